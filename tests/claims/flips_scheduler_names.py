"""Evidence that would change the verdicts on the scheduler's settings: id -> [({evidence: value}, word)]."""
FLIPS = {
    "C53": [({"written_now": 1}, "supported"), ({"written_ever": 1}, "outdated")],
    "C54": [({"written_now": 1}, "conditional"), ({"written_now": 1, "gap": (0.9, 0.8, 0.95)}, "supported"),
            ({"written_now": 1, "gap": (1.0, 0.8, 1.2)}, "inconclusive"),
            ({"written_ever": 1}, "outdated")],
    "C55": [({"by_arrival": 0}, "refuted"), ({"default": 0}, "conditional")],
    "C56": [({"built_in": 0}, "supported"), ({"added": 2023}, "refuted"), ({"added": 2025}, "outdated")],
}
