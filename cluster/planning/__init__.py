"""The planner: what a model costs in memory, time and money on given GPUs. Pure arithmetic; see `cluster.planner`."""
