"""How help reads: verbs and options in groups, examples at the end, up to 100 columns. No markup."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

COLUMNS = {"max_content_width": 100}
LARGEST = 2**63 - 1                 # whole number of an option: what is beyond no float holds when it is multiplied
# verbs in the order of the groups; one that none of them names is listed behind them
GROUPS = {
    "Measure": ("measure", "check", "score", "trace", "validate-gpu"),
    "Studies and their results": ("run", "query", "report", "compare", "figure", "export", "claims"),
    "Sizes and serving": ("size", "plan", "simulate", "watch", "lint"),
    "This machine": ("ls", "doctor", "lab"),
}


def in_groups(records: Mapping[str, Any], groups: Mapping[str, Sequence[str]], rest: str) -> dict[str, list[Any]]:
    """The records by group, in the groups' order; those that no group names stand under `rest`, behind them."""
    named = {name for names in groups.values() for name in names}
    found = {group: [records[name] for name in names if name in records] for group, names in groups.items()}
    found[rest] = found.get(rest, []) + [record for name, record in records.items() if name not in named]
    return {group: some for group, some in found.items() if some}


class Verbs(TyperGroup):
    """The list of verbs, each with its whole first sentence."""

    def format_commands(self, ctx, formatter) -> None:
        records = {name: (name, (command.help or "").partition("\n")[0]) for name in self.list_commands(ctx)
                   if (command := self.get_command(ctx, name)) and not command.hidden}
        for group, rows in in_groups(records, GROUPS, "Others").items():
            with formatter.section(group):
                formatter.write_dl(rows)


class Verb(TyperCommand):
    """A verb with its help: arguments, options in GROUPS, and EXAMPLES that can be typed as they stand."""
    GROUPS: Mapping[str, Sequence[str]] = {}
    EXAMPLES: Sequence[str] = ()

    def invoke(self, ctx) -> Any:
        for name, value in ctx.params.items():
            if type(value) is int and abs(value) > LARGEST:
                raise ValueError(f"--{name.replace('_', '-')} is far too large: {LARGEST:,} is the most")
        return super().invoke(ctx)

    def format_options(self, ctx, formatter) -> None:
        records = {param.name: (param.param_type_name, param.get_help_record(ctx)) for param in self.get_params(ctx)}
        arguments = [record for kind, record in records.values() if kind == "argument" and record]
        options = {name: (record[0].lstrip(" /"), record[1]) for name, (kind, record) in records.items()
                   if kind == "option" and record}                  # a flag without a positive form begins with " / "
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        for group, rows in in_groups(options, self.GROUPS, "Options").items():
            with formatter.section(group):
                formatter.write_dl(rows)

    def format_epilog(self, ctx, formatter) -> None:
        if self.EXAMPLES:
            with formatter.section("Examples"):
                for example in self.EXAMPLES:
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")


def verb(*examples: str, **groups: str) -> type[Verb]:
    """A verb with these examples, and its options in groups: a group's name with _ for spaces = names of parameters."""
    return type("Verb", (Verb,), dict(EXAMPLES=examples, GROUPS={
        name.replace("_", " "): tuple(names.split()) for name, names in groups.items()}))
