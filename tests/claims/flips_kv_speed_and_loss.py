"""Evidence that would change the verdicts on speed and loss: id -> [({name: value or (value, low, high)}, word)]."""
SPEED = [({"most": 0.02}, "refuted"), ({"least": 0.3, "miss": 0.01}, "refuted"),
         ({"least": 0.3, "miss": 0.2}, "inconclusive"), ({"most": 0.5}, "conditional"),
         ({"least": None}, "untestable here")]
ALL_SMALL = {name: (0.0002, -0.0003, 0.0008) for name in ("plain", "tensor", "token")}
ALL_LARGE = {name: (0.02, 0.01, 0.03) for name in ("plain", "tensor", "token")}
WORSE = {f"{name}_minus_fp8": (0.003, 0.002, 0.004) for name in ("tensor", "token", "channel", "head")}
INSIDE = {name: (0.002, 0.0015, 0.0025) for name in ("tensor", "head", "channel", "token")}
FLIPS = {
    "C47": [*SPEED, ({"least": 0.07, "most": 0.09, "miss": 0.01}, "supported"),
            ({"least": 0.07, "most": 0.09, "miss": 0.1}, "inconclusive")],
    "C48": [*SPEED, ({"least": 0.04, "most": 0.06, "miss": 0.01}, "supported"),
            ({"least": 0.04, "most": 0.06, "int8": 0.6, "miss": 0.01}, "supported")],
    "C49": [(ALL_SMALL, "supported"), (ALL_LARGE, "refuted"),
            (ALL_LARGE | {"token": ALL_SMALL["token"]}, "conditional"),
            (ALL_SMALL | {"plain": (0.001, -0.002, 0.004)}, "inconclusive"), ({"token": None}, "untestable here")],
    "C50": [(WORSE | INSIDE, "supported"), (WORSE | INSIDE | {"head": (0.01, 0.008, 0.012)}, "conditional"),
            ({"channel_minus_fp8": (-0.003, -0.004, -0.002)}, "refuted"), (WORSE, "inconclusive"),
            ({"token_minus_fp8": None}, "untestable here")],
}
