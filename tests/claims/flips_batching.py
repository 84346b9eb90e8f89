"""Evidence that would change the verdicts on batching: id -> [({evidence: value or (value, low, high)}, word)]."""
FLIPS = {
    "C51": [({"tokens_flooded": (1.02, 0.9, 1.1)}, "inconclusive"), ({"tokens_flooded": (0.9, 0.8, 0.95)}, "refuted"),
            ({"ttft_calm": (1, 0.9, 1.1)}, "conditional"), ({"tokens_flooded": 1.5, "ttft_calm": 0.5}, "supported")],
    "C52": [({"tokens_flooded": (1.02, 0.9, 1.1)}, "inconclusive"), ({"tokens_flooded": (0.9, 0.8, 0.95)}, "refuted"),
            ({"calm_share": 0.8, "decode_compute": 0.7}, "supported"), ({"decode_compute": 0.7}, "conditional")],
    "C57": [({"mean_azure": (0.98, 0.9, 1.05)}, "inconclusive"), ({"mean_azure": 1.2, "mean_sharegpt": 2}, "refuted"),
            ({"long_azure": 0.9, "long_sharegpt": 0.9, "longest_wait": 0.9}, "supported"),
            ({"long_azure": 0.9, "long_sharegpt": 0.9}, "conditional"),
            ({"long_azure": 0.9, "long_sharegpt": 0.9, "longest_wait": (1, 0.9, 1.1)}, "inconclusive")],
    "C58": [({"tokens_80": (0.99, 0.985, 0.995), "bounds": 1.1}, "supported"), ({"preempted_80": 0.08}, "refuted"),
            ({"preempted_80": 0.07}, "inconclusive"),
            ({"tokens_80": (0.99, 0.985, 0.995)}, "conditional"), ({"tokens_80": (0.98, 0.95, 1)}, "inconclusive")],
}
