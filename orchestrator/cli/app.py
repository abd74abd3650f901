"""The table of all commands, and the program that runs them.

A command is one line of ``COMMANDS`` and one module with its options, its call and what it prints. The module is
imported when the command is called: ``--help``, the names that shells complete and the answer to a mistyped command
come from the table alone, so what a command imports costs no other command anything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from orchestrator.cli.arguments import COMPLETED_LINE
from orchestrator.cli.exits import ExitCode, complain, exit_code_of
from orchestrator.core.errors import OrchestratorError, SpecError
from orchestrator.core.security import redaction
from orchestrator.services import settings_sources as configuration

_SENTENCE = 200
"""Characters: the first sentence of every command's help, which is wrapped and never cut."""


HANDED_ON = ("store", "output")
"""Options that may stand before the command or behind it, and are the command's: one without them refuses them."""


class Command(NamedTuple):
    """One line of the table."""

    name: str
    summary: str
    """The first sentence of the command's own help."""
    place: str = ""
    """Module below ``orchestrator.cli`` if it is not ``commands.NAME``; ``:`` and an attribute if that is not the name.

    There is a function, or for commands with verbs a ``typer.Typer``.
    """


COMMANDS: Mapping[str, tuple[Command, ...]] = {
    "Write a sweep": (
        Command("init", "Write a commented sweep.yaml to begin with, and the schema that editors check it by."),
        Command("validate", "Say whether a sweep.yaml is right, and if not, where, why and what to do."),
        Command("schema", "Print the JSON Schema of sweep.yaml (draft-07), which editors check and complete by."),
        Command("plan", "Show what a submit would run and reuse, how long it takes and what it costs."),
        Command("forecast", "Run sweeps on virtual time, failures included: how long, how well used, what it costs."),
        Command("labels", "Look at label spaces."),
        Command("data", "Convert, index, verify and look at WebDataset shards."),
    ),
    "Run it": (
        Command("submit", "Plan a sweep, run it, and print its answer."),
        Command("run", "Reproduce one job in the foreground; by default nothing of it stays in the store."),
        Command("up", "Start this directory's background stack: Ray with its dashboard, and MLflow.", "commands.stack"),
        Command(
            "down",
            "Stop this directory's background stack; sweeps go on where they were at the next submit or up.",
            "commands.stack",
        ),
    ),
    "See how it stands": (
        Command("status", "Show the state of a sweep's jobs, from the store alone."),
        Command("watch", "Show a sweep full-screen as it goes; on a pipe, one line per job that ends."),
        Command(
            "top", "Show all sweeps, their jobs, what runs where and how fast, live; pause, resume and cancel by keys."
        ),
        Command(
            "logs", "Print what attempts printed and logged, from the store; without a job, of all chosen jobs by time."
        ),
        Command(
            "describe",
            "Show all that is known of one job: identity, attempts, failures, and where its results and logs are.",
        ),
        Command("explain", "Say why a job has no result yet: the nearest result of the store, and what differs."),
        Command("notify", "Show who was told what about a sweep, or try whether notifications arrive."),
        Command(
            "doctor",
            "Check store, credentials, disks, tracking, and every node of the cluster; "
            "say what to do about what fails.",
        ),
    ),
    "Steer it": (
        Command("pause", "Start nothing new of a sweep until it is resumed; what runs goes on.", "commands.lifecycle"),
        Command("resume", "Let a paused sweep go on.", "commands.lifecycle"),
        Command("stop", "End a sweep gently: what runs goes on to its end, nothing else starts.", "commands.lifecycle"),
        Command(
            "cancel",
            "End a sweep, or some of its jobs, now: what runs ends after a checkpoint, nothing else starts.",
            "commands.lifecycle",
        ),
        Command(
            "retry",
            "Give jobs that failed, were skipped or cancelled another chance; without jobs all of them.",
            "commands.lifecycle",
        ),
        Command("priority", "Give a sweep another priority until its plan changes.", "commands.lifecycle"),
    ),
    "Take the answer": (
        Command(
            "report",
            "Compute the answer from the artifacts, print it and save it in the store; works while the sweep runs.",
        ),
        Command(
            "compare",
            "Compare the same cells of several sweeps, paired by seeds; with --samples, two networks image by image.",
        ),
        Command("power", "Say how many seeds make a difference visible, and what they cost."),
        Command(
            "export", "Write a backbone for timm: safetensors, configuration, and a card of what it is and was made of."
        ),
        Command("publish", "Bring MLflow up to date with a sweep; safe to repeat."),
        Command(
            "reproduce",
            "Write what a submitted sweep was made from: its sweep.yaml complete in itself, "
            "packages, code and changes.",
        ),
    ),
    "Keep the store": (
        Command("ls", "List what the store holds.", "commands.store"),
        Command("du", "Show what sweeps, kinds of jobs or label spaces take.", "commands.store"),
        Command(
            "gc",
            "Show or collect what no sweep, pin or committed result needs; safe while sweeps run.",
            "commands.store",
        ),
        Command(
            "fsck",
            "Report every missing, short or altered object of the store, and repair what can be repaired.",
            "commands.store",
        ),
    ),
    "Keep a cluster": (
        Command("cluster", "Ray clusters on clouds, Kubernetes, Slurm and machines of your own."),
        Command(
            "serve",
            "Serve a store on the Ray cluster at RAY_ADDRESS until told to end; "
            "then let every attempt write a checkpoint.",
        ),
        Command(
            "drain",
            "Bring the whole cluster to rest, for an upgrade or maintenance: no sweep starts anything until --end.",
        ),
        Command("quota", "Bound what each user's sweeps hold at once on a cluster."),
        Command("config", "Show the settings that count here, and name places to act at.", "commands.config:group"),
    ),
}
"""By section of ``--help``, in the order in which people need them."""


class CommandTable(TyperGroup):
    """The program's commands: lines of the table until one of them is called, which is then loaded."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(**settings)
        lines = [command for section in COMMANDS.values() for command in section]
        self.commands = {command.name: TyperCommand(command.name, help=command.summary) for command in lines}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - classes that typer keeps private
        """The command that a line calls, with all its options; options of the program that it has too become its own.

        They are put before its own arguments, so that what stands behind the command counts.
        """
        name, found, rest = super().resolve_command(ctx, args)
        command = found and load_command(str(name))
        given = [f"--{option}={ctx.params[option]}" for option in HANDED_ON if ctx.params.get(option)]
        verbs = 1 if isinstance(command, TyperGroup) and rest and not rest[0].startswith("-") else 0
        return name, command, [*rest[:verbs], *given, *rest[verbs:]]

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
        alone.command(name)(found)
    made: Any = typer.main.get_command(alone)
    return made.commands[name]


def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and its code's digest, and end.", is_eager=True)
    ] = False,
    context: Annotated[  # noqa: ARG001 - taken from the line before it is parsed, see run_app; here for --help
        str, typer.Option("--context", metavar="NAME", help="Act there; see: orchestrator config contexts.")
    ] = "",
    store: Annotated[  # noqa: ARG001 - see HANDED_ON
        str, typer.Option("--store", metavar="URI", help="Object store that the command uses; also behind its name.")
    ] = "",
    output: Annotated[  # noqa: ARG001 - see HANDED_ON
        str, typer.Option("-o", "--output", metavar="FORM", help="Form of its result: json, ...; also behind its name.")
    ] = "",
) -> None:
    """Options of the program itself."""
    if version:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as version_of

        from orchestrator.core.code import package_digest

        try:
            number = version_of("pretraining-orchestrator")
        except PackageNotFoundError:
            number = "of a source tree"
        sys.stdout.write(f"orchestrator {number} (code {package_digest()[:12]})\n")
        raise typer.Exit


app = typer.Typer(
    name="orchestrator",
    cls=CommandTable,
    help="Which pretraining is better, and is it more than the seed? One sweep.yaml in, one answer out.",
    callback=options,
    invoke_without_command=True,
    no_args_is_help=True,
    add_completion=True,
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
