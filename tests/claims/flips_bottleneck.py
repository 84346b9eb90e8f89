"""Evidence that would change the verdicts of section 1: id -> [({evidence: value or (value, low, high)}, word)]."""
FLIPS = {
    "C03": [({"kv_over_weights": 1.5}, "supported"), ({"kv_over_weights": 0.01}, "refuted")],
}
