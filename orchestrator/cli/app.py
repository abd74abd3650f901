"""The table of all commands, and the program that runs them.

A command is one line of ``COMMANDS`` and one module with its options, its call and what it prints. The module is
imported when the command is called: ``--help``, the names that shells complete and the answer to a mistyped command
come from the table alone, so what a command imports costs no other command anything.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from orchestrator.cli.arguments import COMPLETED_LINE
from orchestrator.cli.exits import ExitCode, complain, exit_code_of
from orchestrator.core.errors import OrchestratorError, SpecError
from orchestrator.core.schema_words import why_refused
from orchestrator.core.security import redaction
from orchestrator.services import settings_sources as configuration

_NEGATIVE = re.compile(r"-\d")
_SENTENCE = 200
"""Characters: the first sentence of every command's help, which is wrapped and never cut."""


HANDED_ON = ("store", "output")
"""Options that may come before or after the command, to which they belong; a command without them refuses them."""


TAKES_NUMBERS = ("priority",)
"""Commands with an argument that may be a negative number, which looks like an option."""


class Command(NamedTuple):
    """One line of the table."""

    name: str
    summary: str
    """The first sentence of the command's own help."""
    place: str = ""
    """Module below ``orchestrator.cli``, if not ``commands.NAME``; ``:`` and an attribute, if not the command's name.

    The attribute is a function, or a ``typer.Typer`` for commands with verbs.
    """


COMMANDS: Mapping[str, tuple[Command, ...]] = {
    "Write a sweep": (
        Command("init", "Write a commented sweep.yaml to start from, and the JSON Schema with which editors check it."),
        Command("validate", "Check a sweep.yaml; for each error print where it is, why, and how to fix it."),
        Command("schema", "Print the JSON Schema of sweep.yaml (draft-07), with which editors check and complete it."),
        Command("plan", "Show what a submit would run and reuse, how long it would take and what it would cost."),
        Command(
            "forecast",
            "Simulate sweeps on a cluster with failures: how long they take, how busy the cluster is, what they cost.",
        ),
        Command("labels", "Show label spaces; give classes a hierarchy."),
        Command("data", "Convert data sets to WebDataset shards; index, verify and show shards."),
    ),
    "Run it": (
        Command("submit", "Plan a sweep, run it, and print its report."),
        Command("run", "Run one job in the foreground; by default the store keeps nothing of it."),
        Command(
            "up",
            "Start this directory's servers in the background: Ray with its dashboard, and MLflow.",
            "commands.stack",
        ),
        Command(
            "down",
            "Stop this directory's servers; the next submit resumes its sweeps.",
            "commands.stack",
        ),
    ),
    "See the state": (
        Command("status", "Show the state of a sweep's jobs; needs only the store."),
        Command(
            "watch",
            "Show a sweep live, or all sweeps; keys pause and cancel; on a pipe, print one line per ended job.",
        ),
        Command(
            "top",
            "Show all sweeps live, with their jobs, nodes and rates; keys pause, resume and cancel.",
            "commands.watch",
        ),
        Command("logs", "Print the log of a job; without a job, the logs of all selected jobs in order of time."),
        Command(
            "describe",
            "Show all details of one job: identity, attempts, failures, and where its results and logs are.",
        ),
        Command("explain", "Show why a job has no result yet: the most similar result in the store, and what differs."),
        Command("notify", "Show the notifications sent about a sweep, or send a test notification."),
        Command(
            "doctor",
            "Check store, credentials, disks, tracking, and every node of the cluster; print how to fix what fails.",
        ),
    ),
    "Steer it": (
        Command("pause", "Pause a sweep: running jobs continue, and no job starts until resume.", "commands.lifecycle"),
        Command("resume", "Resume a paused sweep.", "commands.lifecycle"),
        Command("stop", "Stop a sweep: running jobs finish, and no other job starts.", "commands.lifecycle"),
        Command(
            "cancel",
            "Cancel a sweep, or some of its jobs: running jobs end after a checkpoint, and no other job starts.",
            "commands.lifecycle",
        ),
        Command(
            "retry",
            "Retry jobs that failed, were skipped or were cancelled; without job names, all of them.",
            "commands.lifecycle",
        ),
        Command("priority", "Change the priority of a sweep until its plan changes.", "commands.lifecycle"),
    ),
    "Get the results": (
        Command(
            "report",
            "Compute the report from the artifacts, print it and save it in the store; works while the sweep runs.",
        ),
        Command(
            "compare",
            "Compare the same cells of several sweeps, paired by seeds; with --samples, two networks image by image.",
        ),
        Command("power", "Compute how many seeds are needed to detect a difference, and what they cost."),
        Command("export", "Export a backbone for timm: safetensors, configuration, and a model card."),
        Command("publish", "Publish a sweep's newest results to MLflow; safe to repeat."),
        Command(
            "reproduce",
            "Write the files to run a submitted sweep again: complete sweep.yaml, packages, code and uncommitted "
            "changes.",
        ),
    ),
    "Manage the store": (
        Command("ls", "List artifacts or pins in the store.", "commands.store"),
        Command("du", "Show how much storage sweeps, kinds of jobs or label spaces use.", "commands.store"),
        Command(
            "gc",
            "Show or delete objects that no sweep, pin or committed result needs; safe while sweeps run.",
            "commands.store",
        ),
        Command(
            "fsck",
            "Check the store: report every missing, truncated or changed object, and repair what can be repaired.",
            "commands.store",
        ),
    ),
    "Manage a cluster": (
        Command("cluster", "Check, start and stop Ray clusters on clouds, Kubernetes, Slurm and your own machines."),
        Command(
            "serve",
            "Run the sweeps of a store on the Ray cluster at RAY_ADDRESS until a signal; then checkpoint all attempts.",
        ),
        Command(
            "drain",
            "Drain the whole cluster for an upgrade or maintenance: no job starts until --end.",
        ),
        Command("quota", "Limit how many GPUs and attempts each user's sweeps use at once on a cluster."),
        Command(
            "config",
            "Show the settings in effect, and manage contexts: named clusters and stores.",
            "commands.config:group",
        ),
    ),
}
"""By section of ``--help``, in the order in which people need them."""


class NamedArgument(TyperArgument):
    """An argument as manuals write it, in usage and help: ``SWEEP``, ``[PLACE]``, ``[JOBS]...``."""

    @property
    def display_name_raw(self) -> str:
        """The name alone; the usage line puts optional arguments into brackets."""
        return (self.metavar or self.name).strip("[]").removesuffix("...").upper().replace("_", "-")

    def _usage_display_name(self) -> str:
        name = self.display_name_raw if self.required else f"[{self.display_name_raw}]"
        return name if self.nargs == 1 else f"{name}..."

    def display_type_rich(self, ctx: Any) -> str | None:  # noqa: ANN401 - a class that typer keeps private
        """The possible values; for names, no type is shown."""
        return super().display_type_rich(ctx) if self.type_descriptor.is_choice else None


class NumberCommand(TyperCommand):
    """A command of ``TAKES_NUMBERS``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - a class that typer keeps private
        """Read the values of a line; a negative number is an argument, and an unknown option is refused as ever."""
        # Only beside a number: typer's own complaint of a mistyped option names the one that is meant.
        ctx.ignore_unknown_options = any(_NEGATIVE.match(word) for word in args)
        rest = super().parse_args(ctx, args)
        arguments = [str(ctx.params.get(one.name)) for one in self.params if isinstance(one, TyperArgument)]
        for word in arguments if ctx.ignore_unknown_options else ():
            if word.startswith("-") and not _NEGATIVE.match(word):
                ctx.fail(f"No such option: {word}")
        return rest


class CommandTable(TyperGroup):
    """The program's commands: lines of the table until one of them is called, which is then loaded."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(**settings)
        lines = [command for section in COMMANDS.values() for command in section]
        self.commands = {command.name: TyperCommand(command.name, help=command.summary) for command in lines}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - classes that typer keeps private
        """The command that a line calls, with all its options.

        Options of the program that the command has, too, are put before its own arguments, so that a later value
        after the command wins.
        """
        name, found, rest = super().resolve_command(ctx, args)
        command = found and load_command(str(name))
        given = [f"--{option}={ctx.params[option]}" for option in HANDED_ON if ctx.params.get(option)]
        verbs = 1 if isinstance(command, TyperGroup) and rest and not rest[0].startswith("-") else 0
        return name, command, [*rest[:verbs], *given, *rest[verbs:]]

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - see above
        """Run the command of a line; values of options that are refused are refused in our words."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            details: list[Any] = getattr(error.__cause__, "errors", list)()  # of pydantic, by which typer reads values
            if details:
                why = why_refused(details[0]["type"], details[0]["msg"], details[0].get("ctx", {}))
                given = repr(details[0]["input"])
                error.message = why if given in why else f"{given} is refused: {why}"
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - see above
        """Write the sections."""
        width = max(map(len, self.commands))
        for title, section in COMMANDS.items():
            with formatter.section(title):
                listed = [(name.ljust(width), self.commands[name]) for name, *_ in section]
                formatter.write_dl([(name, command.get_short_help_str(_SENTENCE)) for name, command in listed])


def load_command(name: str) -> Any:  # noqa: ANN401 - of a class that typer keeps private
    """A command of the table as typer makes it from its function, or from the ``Typer`` of its verbs."""
    command = next(one for section in COMMANDS.values() for one in section if one.name == name)
    module, _, attribute = command.place.partition(":")
    found = getattr(import_module(f"orchestrator.cli.{module or f'commands.{name}'}"), attribute or name)
    alone = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.callback()(lambda: None)  # with one, typer makes a group even of a single command
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
    else:
        alone.command(name, cls=NumberCommand if name in TAKES_NUMBERS else None)(found)
    made: Any = typer.main.get_command(alone)
    _name_arguments(made.commands[name])
    return made.commands[name]


def _name_arguments(command: Any) -> None:  # noqa: ANN401 - see above
    for parameter in command.params:
        if isinstance(parameter, TyperArgument):
            parameter.__class__ = NamedArgument  # typer has no option for the class of its groups
    for verb in getattr(command, "commands", {}).values():
        _name_arguments(verb)


def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and the digest of the code, and exit.", is_eager=True)
    ] = False,
    context: Annotated[  # noqa: ARG001 - taken from the line before it is parsed, see run_app; here for --help
        str, typer.Option("--context", metavar="NAME", help="Context to use; see: orchestrator config contexts.")
    ] = "",
    store: Annotated[  # noqa: ARG001 - see HANDED_ON
        str, typer.Option("--store", metavar="URI", help="Object store: path or URI; may also follow the command.")
    ] = "",
    output: Annotated[  # noqa: ARG001 - see HANDED_ON
        str,
        typer.Option("-o", "--output", metavar="FORM", help="Output format: json, ...; may also follow the command."),
    ] = "",
) -> None:
    """Options of the program itself."""
    if version:
        from orchestrator.core.code import package_digest, version_or_empty

        number = version_or_empty("pretraining-orchestrator") or "of a source tree"
        sys.stdout.write(f"orchestrator {number} (code {package_digest()[:12]})\n")
        raise typer.Exit


app = typer.Typer(
    name="orchestrator",
    cls=CommandTable,
    help="Which pretraining is better, and is the difference larger than the noise between seeds? Write a sweep.yaml, "
    "get a report with error bars.",
    callback=options,
    invoke_without_command=True,
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def run_app() -> None:
    """Run the command of ``sys.argv`` and end the process with its exit code."""
    redaction.install()
    try:
        # Shells ask for completions by variables, with the line so far in one of them.
        context, arguments = configuration.take_flag(sys.argv[1:] or os.environ.get(COMPLETED_LINE, "").split())
        if sys.argv[1:] and configuration.lacks_name(arguments):
            raise SpecError(("--context needs a name; see: orchestrator config contexts",))
        configuration.apply(Path.cwd(), os.environ, context)
        # Called by itself, other than by its Typer, which would put a hook of its own at sys.excepthook.
        typer.main.get_command(app)(args=arguments if sys.argv[1:] else None)
    except OrchestratorError as error:
        complain(str(error))
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        complain("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
    finally:
        _flush()


def _flush() -> None:
    """Write what is left for stdout; if its reader has gone, drop it: the interpreter would report that as it ends."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
