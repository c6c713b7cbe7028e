"""vLLM-Omni on a CPU: an out-of-tree platform that runs its Qwen3-Omni stages in vLLM's CPU workers.

Environment variables, read when a stage starts:
- `VLLM_OMNI_CPU_COMPILE=1`: the code predictor goes through torch.compile as on a GPU; otherwise it runs eager.
- `VLLM_OMNI_CPU_GREEDY_CODES=1`: residual codes are greedy. vLLM-Omni always samples them (top_k 50, top_p 0.8).
"""


def register() -> str | None:
    """The platform's class, for vLLM-Omni's plugin loader; None where this vLLM is not the build for CPUs."""
    from vllm.platforms import current_platform

    return "vllm_omni_cpu.platform.CPUOmniPlatform" if current_platform.is_cpu() else None
