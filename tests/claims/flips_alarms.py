"""Evidence that would change the verdicts on evictions and alarms: id -> [({evidence: value}, word)]."""
FLIPS = {
    "C70": [({"calm_on": 0, "complete": 0.9}, "supported"), ({"calm_on": 0}, "conditional"),
            ({"complete": (0.9375, 0.7, 0.998)}, "conditional"), ({"recomputes": 0}, "conditional"),
            ({"preempted": 0}, "inconclusive"), ({"reports": None}, "refuted"),
            ({"calm_on": (0.05, 0.0, 0.2)}, "inconclusive"), ({"complete": None}, "untestable here")],
    "C71": [({"refused": 0, "cut": 0}, "supported"),
            ({"tail_more": 1.0, "preempted_more": 0.2, "preempted_less": 0.2}, "refuted"),
            ({"tail_more": (1.0, 0.9, 1.1), "preempted_less": (0.13, 0.1, 0.2)}, "inconclusive"),
            ({"tail_more": 1.0}, "conditional")],
    "C72": [({"evictions_on": 0}, "supported"), ({"preemptions_on": 0.5}, "refuted"),
            ({"evictions_on": (0.04, 0.0, 0.3)}, "inconclusive"),
            ({"preemptions_on": (0.04, 0.0, 0.3)}, "inconclusive")],
}
