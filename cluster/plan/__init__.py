"""What a model needs and what it will do on given GPUs, before they are bought.

    name, config, folder = model_config("glm-5.2")          # or a folder or config.json of a Hugging Face checkpoint
    arch = architecture(config, name)
    settings = PoolSettings(gpu("H200"), weight_format("int4", arch), kv_format("fp8", arch), Parallel(tp=8))
    plan = plan_pool(arch, settings)                         # plan.kv_tokens, plan.max_requests, plan.problems
    check_fit(plan, "decode pool")                           # DoesNotFit, with three settings that would
    roofline = Roofline.of(arch, settings)                   # roofline.decode_step_seconds(batch, context_tokens_total)

Pure arithmetic over facts in `cluster/models.json`: no clock, no network, no GPU.
"""
