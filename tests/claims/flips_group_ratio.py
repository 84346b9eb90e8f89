"""Other evidence for the claims on the group ratio, and the word that it must give."""
FLIPS = {
    "C23": [({"knees": 4, "wide": (0.5, 0.4, 0.6)}, "supported"), ({"narrow": (0.001, -0.002, 0.004)}, "refuted"),
            ({"wide": (0.5, 0.4, 0.6)}, "conditional"), ({"knees": 4}, "conditional"),
            ({"knee": (0.03, 0.01, 0.05)}, "conditional"), ({"wide": (0.01, -0.01, 0.03)}, "inconclusive"),
            ({"narrow": (0.02, 0.005, 0.03)}, "inconclusive"), ({"narrow": None}, "untestable here")],
    "C24": [({"beyond": (0.5, 0.4, 0.6)}, "supported"), ({"beyond": (0.002, -0.001, 0.005)}, "refuted"),
            ({"beyond": (0.01, -0.1, 0.12)}, "inconclusive"), ({"narrow_longer": (0, 0, 0)}, "untestable here"),
            ({"tried": None}, "untestable here")],
    "C25": [({"beyond": (0.5, 0.4, 0.6)}, "supported"),
            ({"beyond": (0.5, 0.4, 0.6), "more": (0.3, 0.2, 0.4)}, "supported"),
            ({"beyond": (0.5, 0.4, 0.6), "more": (0.0, -0.1, 0.1)}, "conditional"),
            ({"beyond": (0.5, 0.4, 0.6), "short": None}, "supported"), ({"beyond": (-0.3, -0.4, -0.2)}, "refuted"),
            ({"beyond": (0.01, -0.1, 0.12)}, "inconclusive"), ({"ships_safe": 60}, "untestable here"),
            ({"tried": None}, "untestable here")],
    "C26": [({"setters": 2, "repaired": (0.01, 0.005, 0.02)}, "supported"), ({"setters": 2}, "conditional"),
            ({"repaired": (0.01, 0.005, 0.02)}, "conditional"), ({"repaired": (0.1, 0.05, 0.2)}, "inconclusive"),
            ({"repaired": None}, "untestable here")],
}
