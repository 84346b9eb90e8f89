"""Evidence that would change the verdicts on capacity: id -> [({evidence: value or (value, low, high)}, word)]."""
FLIPS = {
    "C67": [({"one_card": 10, "mean_length": 1.0, "small": (1.0, 0.9, 1.1)}, "supported"),
            ({"group": (0.5, 0.4, 0.6), "small": (1.5, 1.4, 1.6)}, "refuted"),
            ({"group": (0.5, 0.4, 0.6)}, "conditional")],
    "C68": [({"within": (0.9, 0.7, 0.98)}, "supported"), ({"within": (0.5, 0.2, 0.8)}, "inconclusive"),
            ({"enough": (1.0, 0.92, 1.0)}, "conditional"),
            ({"enough": (0.9, 0.6, 0.99)}, "inconclusive"), ({"needed": 3.0}, "refuted")],
    "C69": [({"autograd_off": 0, "gradient_terms": 1}, "supported"), ({"gradient_terms": 1}, "conditional"),
            ({"temporary": 0}, "refuted")],
}
