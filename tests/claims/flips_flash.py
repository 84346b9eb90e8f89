"""Evidence that would change verdicts on Flash Attention: id -> [({evidence: value, (value, low, high)}, word)]."""
FLIPS = {
    "C27": [({"flash": 0.5, "paged": 0.5}, "supported"), ({"flash": 0.5}, "conditional"),
            ({"paged": 0.9}, "conditional"), ({"flash": None}, "untestable here"),
            ({"flash": 1.0, "paged": 1.0, "bytes": None, "pages": None}, "refuted")],
    "C28": [({"decode": 1.0}, "supported"), ({"flash": (1.95, 1.9, 2.0)}, "refuted"),
            ({"longer": None, "naive": (1.1, 1.0, 1.2)}, "refuted"), ({"flash": (1.1, 0.8, 1.4)}, "inconclusive"),
            ({"longer": (1.8, 1.6, 2.0)}, "inconclusive"),
            ({"longer": (1.1, 1.0, 1.2)}, "refuted"), ({"decode": 0.1}, "conditional"),
            ({"flash": None}, "untestable here")],
    "C29": [({"decode": 3.0}, "supported"), ({"least": 0.9, "most": 0.95}, "refuted"), ({"least": 0.9}, "conditional"),
            ({"decode": 1.02}, "conditional"), ({"decode": None}, "untestable here")],
    "C30": [({"c30_fa2_cc9": 1, "c30_fa2_cc10": 1}, "supported"), ({"c30_fa2_cc8": 0}, "outdated"),
            ({"c30_fa2_cc8": 0, "c30_fa2_once": 0}, "refuted"), ({"c30_fa2_cc9": 1}, "conditional")],
    "C31": [({"now": 1}, "supported"), ({"once": 0}, "refuted"), ({"fallback": 0}, "outdated"),
            ({"once": 0, "fallback": None}, "refuted")],
}
