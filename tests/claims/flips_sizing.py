"""Evidence that would change the verdicts of section 2: id -> [({evidence: value or (value, low, high)}, word)]."""
FLIPS = {
    "C08": [({"own": 1.1}, "refuted"), ({"exact": 1.0}, "conditional"),
            ({"exact": 1.0, "copies": 1.0, "scales": 1.0}, "supported"),
            ({"copies": 1.0, "scales": 1.0}, "conditional")],
    "C09": [({"kv_heads": 64}, "conditional"), ({"layers": 64, "head_dim": 64, "kv_heads": 4}, "refuted")],
    "C10": [({"fp16": 4}, "refuted"), ({"own": 1}, "conditional"), ({"auto": None}, "supported")],
    "C11": [({"bytes": 1_342_177_281}, "refuted"), ({"in_blocks": 1_400_000_000}, "conditional"),
            ({"in_blocks": None}, "supported")],
    "C12": [({"gb": 1.25}, "supported"), ({"gib": 1.3}, "refuted")],
    "C13": [({"gib": 30, "gb": 32.2}, "refuted"), ({"live": 20.0}, "conditional"), ({"live": None}, "conditional"),
            ({"gb": 20.0, "live": (19.8, 19.0, 20.5)}, "supported")],
    "C14": [({"gb": 160, "gib": 140}, "conditional"), ({"gb": 180, "gib": 167}, "refuted"),
            ({"gb": 134}, "supported")],
    "C15": [({"on_8": 8}, "supported"), ({"on_8": (20, 17, 24)}, "conditional"),
            ({"on_8": (35, 30, 40)}, "conditional"), ({"on_4": None}, "refuted")],
}
