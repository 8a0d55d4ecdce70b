"""The sections of a `ClusterSpec` that are about clients: where they come in, what they may use, what is traced."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TenantSpec(Section):
    """What one tenant may use of the whole service, however many frontends there are; null: no limit."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(
        default=None, ge=1, description="prompt and max_tokens; what was not generated is given back at the end"
    )
    kv_tokens: int | None = Field(
        default=None, ge=1, description="prompt and max_tokens of its requests that wait or run at one time"
    )

    @property
    def any(self) -> bool:
        return any((self.requests_per_minute, self.tokens_per_minute, self.kv_tokens))


class FrontendSpec(Section):
    replicas: int = Field(default=1, ge=1)
    cpus_per_replica: float = Field(default=0.25, ge=0, description="CPUs that Ray reserves")
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    admin_hosts: tuple[str, ...] = Field(
        default=(),
        description="further names in the Host header under which routes that are open without a key because `host` is "
        "a loopback address may be asked; loopback's own and `host` always may",
    )
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_auto_tool_choice: bool = False
    server_args: dict[str, Any] = Field(
        default={}, description="further arguments of vLLM's OpenAI server, as they are"
    )
    keys_file: str | None = Field(
        default=None,
        min_length=1,
        description="hashes of API keys, written by `pageferry keys`; read again when it changes. Keys may also be in "
        "the environment of the frontends (PAGEFERRY_API_KEYS, PAGEFERRY_ADMIN_KEY), never in this file. With neither, "
        "every client is let in, and what is not for clients is open where `host` is a loopback address",
    )
    tenants: dict[str, TenantSpec] = Field(default={}, description="limits of single tenants, by name")
    each_tenant: TenantSpec = Field(default=TenantSpec(), description="limits of a tenant that `tenants` does not name")
    body_bytes_max: int = Field(
        default=64 << 20,
        ge=1 << 10,
        description="of one request; a prompt of a million token ids has 8 MB, an image of 4k x 4k about as much",
    )
    bodies_bytes_max: int = Field(
        default=512 << 20, ge=1 << 10, description="of all requests that a frontend holds at once"
    )
    grammar_bytes_max: int = Field(
        default=64 << 10, ge=1, description="of a schema, regular expression or grammar that an answer has to follow"
    )
    grammar_weight_max: int = Field(
        default=4000,
        ge=1,
        description="of the same: values, alternatives, a quarter of each repetition, and a fiftieth of the square of "
        "an object's optional properties; one compiles after the other in each engine, about a second at this size",
    )
    body_wait_s: float = Field(default=30.0, gt=0, description="from a request's head to the end of its body")

    def limits_of(self, tenant: str) -> TenantSpec:
        return self.tenants.get(tenant, self.each_tenant)


class TracingSpec(Section):
    """OpenTelemetry spans of requests. Off unless `endpoint` is set."""

    endpoint: str | None = Field(
        default=None,
        pattern="^https?://",
        description="of a collector, OTLP over HTTP: http://collector:4318/v1/traces",
    )
    sample_ratio: float = Field(
        default=0.01, ge=0, le=1, description="of requests without a traceparent; one with it decides by its own flag"
    )
