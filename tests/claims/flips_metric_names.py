"""Evidence that would change the verdicts on metrics' names: id -> [({evidence: value}, word)]."""
_ANY = [({"written_now": 2}, "supported"), ({"written_ever": 1}, "outdated"), ({"colon_now": 1}, "conditional"),
        ({"colon_now": 0, "colon_ever": 1}, "outdated"), ({"colon_now": 0, "colon_ever": 0}, "refuted")]
FLIPS = {name: _ANY for name in ("C63", "C64", "C65", "C66")}
