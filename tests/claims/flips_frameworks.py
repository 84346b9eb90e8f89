"""Evidence that would change the verdicts on frameworks: id -> [({evidence: value}, word)]."""
FLIPS = {
    "C59": [({"sglang_transformers": 0, "tgi_transformers": 0}, "supported"),
            ({"sglang_transformers": 0}, "conditional"),
            ({"vllm_blocks": 0}, "refuted"), ({"vllm_transformers": 0}, "refuted")],
    "C60": [({"maintenance": 0}, "supported"), ({"continuous": 0}, "refuted")],
    "C61": [({"vllm_ahead_when_full": 0}, "supported"), ({"serves_itself": 0}, "conditional"),
            ({"ahead_at_50": 0.9, "start": 0.5}, "refuted")],
    "C62": [({"nodes": 16, "gain": 0.3}, "supported"), ({"nodes": 16}, "conditional"),
            ({"nodes": 16, "gain": -0.1}, "refuted"), ({"nodes": 9, "gain": 0.3}, "untestable here")],
}
