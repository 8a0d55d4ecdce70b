"""Ray Serve's autoscaling policy of both pools: it holds them at what the application's controller says.

Serve makes one object a deployment and calls it at every turn of its own control loop, so nothing here may block: a
question goes out, and the answer is taken at a later turn. While there is none, the target stands as it is.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import ray

from actors.messages import PlatformSize, Role
from cluster.names import NAMESPACE, controller_actor

logger = logging.getLogger("ray.serve")

ASK_EVERY_S = 1.0
FIND_EVERY_S = 1.0
ANSWER_S = 5.0  # a question older than this is forgotten: the controller hangs or has ended


class FollowController:
    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._actor: Any = None
        self._question: Any = None
        self._asked_at = -ANSWER_S
        self._looked_at = -FIND_EVERY_S
        self._problem = ""  # that was logged last

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Replicas that the deployment should have now, for Serve; `context` is its `AutoscalingContext`."""
        target = int(context.target_num_replicas)
        try:
            answer = self._answer()
            self._ask(str(context.app_name), int(context.current_num_replicas), target)
        except Exception as error:  # an exception out of here would stop Serve's loop for every deployment
            if (problem := f"{type(error).__name__}: {error}") != self._problem:  # not again at each turn
                logger.info("the controller of %s cannot be asked for %s: %s", context.app_name, self._pool, problem)
            self._problem = problem
            self._actor = self._question = answer = None
        return (target if answer is None else answer), {}

    def _answer(self) -> int | None:
        if self._question is None:
            return None
        done, _ = ray.wait([self._question], timeout=0)
        if done:
            question, self._question = self._question, None
            answer: int | None = ray.get(question)
            self._problem = ""
            return answer
        if time.monotonic() - self._asked_at > ANSWER_S:
            self._question = self._actor = None
        return None

    def _ask(self, application: str, current: int, target: int) -> None:
        now = time.monotonic()
        if self._question is not None or now - self._asked_at < ASK_EVERY_S:
            return
        if self._actor is None:
            if now - self._looked_at < FIND_EVERY_S:
                return
            self._looked_at = now
            self._actor = ray.get_actor(controller_actor(application), namespace=NAMESPACE)
        self._asked_at = now
        self._question = self._actor.call.remote(PlatformSize(Role(self._pool), current, target))
