"""Evidence that would change the verdicts of section 1: id -> [({evidence: value or (value, low, high)}, word)]."""
FLIPS = {
    "C01": [({"models": 0.95, "kimi_k3": 1.0}, "supported"), ({"models": 0.5, "kimi_k3": 1.0}, "conditional"),
            ({"kimi_k3": 0.5}, "conditional"), ({"llama": 0.5, "qwen": 0.25}, "refuted")],
    "C02": [({"gqa": 3e9, "llama": 3e9}, "supported"), ({"gqa": 3e9}, "conditional"), ({"mha": 1e9}, "refuted")],
    "C03": [({"kv_over_weights": 3.0}, "supported"), ({"kv_over_weights": 1.5}, "conditional"),
            ({"kv_over_weights": 0.01, "with_64_heads": None, "equal_at": None}, "refuted")],
    "C04": [({"one": 0.6}, "supported"), ({"half_at": 100_000}, "conditional"), ({"half_at": 600_000}, "refuted"),
            ({"room": (440_000, 400_000, 480_000)}, "conditional"), ({"room": (400_000, 390_000, 410_000)}, "refuted")],
    "C05": [({"latent": 1.0}, "supported"), ({"heads": 0.8, "latent": 1.0}, "conditional"),
            ({"heads": 0.3}, "refuted"), ({"long": 0.9}, "refuted"), ({"exponent": None}, "conditional")],
    "C06": [({"batch_1": 0.2}, "refuted"), ({"gpus": 0.5}, "conditional"), ({"sm_busy": 0.95}, "supported")],
    "C07": [({"decode": 1.5}, "refuted"), ({"prefill": 1.0, "batch": 1.0}, "supported"),
            ({"prefill": 1.0}, "conditional"), ({"batch": 1.0}, "conditional")],
}
