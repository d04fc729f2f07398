"""The commands of a federation over a network: `federation`, `serve`, `join` and `replay`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from polytier._terminal import Interrupt, JsonLines, loading_torch, say, set_up_logging
from polytier._text import counted
from polytier.cli.options import Trust, a_path, check_code

Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings only.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print log messages.")]
Health = Annotated[
    str | None, typer.Option("--health", metavar="HOST:PORT", help="Answer /healthz and /metrics (Prometheus) there.")
]


class LogFormat(StrEnum):
    """How lines of the log look."""

    text = "text"
    json = "json"


LogAs = Annotated[LogFormat, typer.Option("--log-format", help="json: one JSON object per line.")]
Keys = Annotated[
    Path,
    typer.Option("--keys", metavar="DIR", parser=a_path, help="Folder with key.pem, cert.pem and ca.pem of this node."),
]
Folder = Annotated[
    Path, typer.Option("--folder", metavar="DIR", parser=a_path, help="Folder of the authority (default federation).")
]
Parent = Annotated[str | None, typer.Option("--parent", metavar="HOST:PORT", help="Where the parent listens.")]
State = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", parser=a_path, help="Folder for rows and models (default state/NAME)."),
]
Via = Annotated[
    str | None,
    typer.Option(
        "--via", metavar="mqtts://HOST:PORT", help="Use this MQTT broker; --parent is then server or team/NAME."
    ),
]
JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", parser=a_path, help="The job.")]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="server, device/NAME, team/NAME, gateway/NAME or broker/NAME.")
]

InJob = Annotated[
    Path | None, typer.Option("--job", metavar="JOB.toml", parser=a_path, help="Change the roster of this job as well.")
]

federation = typer.Typer(no_args_is_help=True, help="A federation over a network: its job, keys and state.")


@federation.command()
def init(job: JobFile) -> None:
    """Check a job, decide what is open, and write it back. A file that does not exist is written as an example."""
    set_up_logging(False, False)
    if not job.exists():
        from polytier.files.write import write_text
        from polytier.runs.job import TEMPLATE

        write_text(job, TEMPLATE)
        say(f"{job} is an example: edit it, then repeat this command")
        return
    loading_torch(False)
    from polytier.runs.job import settle

    settled = settle(job)
    tree = settled.tree
    teams = "".join(f" in {counted(tree.size(t), 'team')}" for t in range(tree.leaf - 1, 0, -1))
    say(f"{job}: {settled.spec.algorithm} for {counted(tree.size(tree.leaf), 'device')}{teams}")
    if tree.num_tiers < settled.roster.num_tiers:
        how = "devices dial the server; with relay = true in [network] they dial their teams, which pass everything on"
        how = "devices dial their teams, which pass everything on to the server" if settled.relayed else how
        say(f"this method has no teams: {how}")


@federation.command()
def ca(folder: Folder = Path("federation")) -> None:
    """Make the authority that signs the certificates of all nodes."""
    from polytier.engines.network.keys import CA_KEY, make_authority

    make_authority(folder)
    say(f"{folder} is the authority of a federation; keep {folder / CA_KEY} secret")


@federation.command()
def enrol(
    name: Name,
    folder: Folder = Path("federation"),
    request: Annotated[
        bool, typer.Option("--request", help="Make a key here and a request NAME.csr for the authority to sign.")
    ] = False,
    renew: Annotated[
        bool, typer.Option("--renew", help="Make a new certificate for the key that the node has already.")
    ] = False,
    job: InJob = None,
    team: Annotated[str | None, typer.Option("--team", metavar="NAME", help="With --job: the team it joins.")] = None,
) -> None:
    """Make the key and the certificate of a node: a folder to carry to it. With --job the roster gets the device."""
    from polytier.engines.network import keys

    check_address(name)
    if renew:
        say(f"copy {keys.renew(folder, name)} to the --keys of {name}; it need not be started again")
        return
    if job is not None:
        from polytier.runs.roster import change_roster

        change_roster(job, device_of(name), team, there=True)
        say(f"{name} is in the roster of {job}; a server that runs takes it in between two rounds, when it has come")
    if request:
        say(f"send {keys.make_request(folder, name)} to the authority; its key stays in {folder}")
        return
    place = keys.enrol(folder, name)
    if name.startswith("broker/"):
        from polytier.engines.network.mqtt import write_broker_files

        write_broker_files(place)
        say(f"{place} has the key, mosquitto.conf and acl of the broker: mosquitto -c {place / 'mosquitto.conf'}")
        return
    say(f"carry {place} to {name}, and use it as --keys there")


@federation.command()
def sign(
    file: Annotated[Path, typer.Argument(metavar="FILE.csr", parser=a_path, help="A request.")],
    folder: Folder = Path("federation"),
) -> None:
    """Sign the request of a node whose key stays with it."""
    from polytier.engines.network import keys

    name, out = keys.sign_request(folder, file)
    check_address(name)
    say(f"{out} is the certificate of {name}: send it back with {folder / keys.CA}, as cert.pem and ca.pem")


@federation.command()
def revoke(name: Name, folder: Folder = Path("federation"), job: InJob = None) -> None:
    """Note that the certificate of a node is no longer valid. With --job the device leaves the roster too."""
    from polytier.engines.network import keys

    if job is not None:
        from polytier.runs.roster import change_roster

        change_roster(job, device_of(name), None, there=False)
        say(f"{name} is no longer in the roster of {job}; a server that runs goes on without it after this round")
    keys.revoke(folder, name)
    say(
        f"{name} is in {folder / keys.REVOKED}; a running server or team whose --keys are in {folder} closes its link "
        "at the next call. Copy the file to the --keys of nodes elsewhere"
    )


@federation.command()
def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", parser=a_path, help="The run folder of the server.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the round of a run, who was there at its end, and who has been absent."""
    from polytier.runs.replay import read_status

    found = read_status(folder)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(
        f"{found['state']} after round {found['round']}; {len(found['present'])} of {found['children']} children there"
    )
    for name, number in found["absences"].items():
        print(f"{name}: absent in {counted(number, 'call')}")


def serve(
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB.toml]", parser=a_path, help="The job, for the server.")
    ] = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")
    ] = "127.0.0.1:8750",
    keys: Keys = Path("federation/server"),
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", parser=a_path, help="Run folder (default runs/JOB).")
    ] = None,
    team: Annotated[str | None, typer.Option("--team", metavar="NAME", help="Run this team instead.")] = None,
    parent: Parent = None,
    via: Via = None,
    state: State = None,
    health: Health = None,
    log_format: LogAs = LogFormat.text,
    trust: Trust = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run the server of a job, or with --team a team. Started again, both continue where they were."""
    log_as(log_format, "server" if team is None else f"team/{team}", quiet, verbose)
    if via is not None:
        place_of("server", via)
    if (job is None) == (team is None):
        raise ValueError("give JOB.toml for the server, or --team NAME --parent HOST:PORT for a team")
    loading_torch(quiet)
    if team is not None:
        from polytier.runs.join import run_team

        if parent is None:
            raise ValueError("--parent is missing: HOST:PORT at which the parent of this team listens")
        home = state or Path("state") / team
        text = run_team(team, place_of(parent, via), via or listen, keys, home, announce, trust, health)
        say(f"polytier: the run is over: {text}", event="end")
        return
    assert job is not None
    from polytier.runs.job import read_job
    from polytier.runs.roster import RosterFile
    from polytier.runs.serve import run_server

    read = read_job(job)
    check_code(read.spec.values(), job, trust)
    folder = out or Path("runs") / job.stem
    with Interrupt() as interrupt:
        run_server(read, via or listen, keys, folder, announce, interrupt, health, RosterFile(job))
    print(folder)


def join(
    parent: Annotated[str, typer.Option("--parent", metavar="HOST:PORT", help="Where the parent listens.")],
    data: Annotated[
        Path, typer.Option("--data", metavar="FILE.npz", parser=a_path, help="x, y and optionally split; or a folder.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="The name of this device in the roster.")] = None,
    names: Annotated[
        Path | None,
        typer.Option("--names", metavar="FILE", parser=a_path, help="Names of devices whose data are DIR/NAME.npz."),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", metavar="DIR", parser=a_path, help="Folder with key.pem, cert.pem and ca.pem."),
    ] = None,
    via: Via = None,
    state: State = None,
    health: Health = None,
    log_format: LogAs = LogFormat.text,
    trust: Trust = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Take part in a run as a device, or as a gateway for several. Started again, it continues where it was."""
    log_as(log_format, f"device/{name}" if name else f"gateway/{data.name}", quiet, verbose)
    if (name is None) == (names is None):
        raise ValueError("give --name NAME with --data FILE.npz, or --names FILE with --data DIR")
    if name is not None:
        files = {name: data}
    else:
        assert names is not None
        files = {each: data / f"{each}.npz" for each in names.read_text(encoding="utf-8").split()}
        if not files:
            raise ValueError(f"{names} has no names; write one per line")
    loading_torch(quiet)
    from polytier.runs.join import run_devices

    own = name or data.name
    place = keys or Path("federation") / f"device-{own}"
    text = run_devices(place_of(parent, via), place, state or Path("state") / own, files, trust, health)
    say(f"polytier: the run is over: {text}", event="end")


def replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", parser=a_path, help="The run folder of the server.")],
    data: Annotated[
        Path, typer.Option("--data", metavar="DIR", parser=a_path, help="Folder with NAME.npz of every device.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", parser=a_path, help="A new run folder.")],
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Simulate a run over a network with the absences that it had, where the data may be in one place."""
    set_up_logging(quiet, verbose)
    loading_torch(quiet)
    from polytier.runs.replay import replay_run

    replay_run(folder, data, out)
    print(out)


def log_as(form: LogFormat, node: str, quiet: bool, verbose: bool) -> None:
    """Set up the log of a node."""
    set_up_logging(quiet, verbose, JsonLines(node) if form is LogFormat.json else None)


def announce(address: str) -> None:
    """Print where a node listens; other programs read this line."""
    print(f"listening at {address}", flush=True)


def place_of(parent: str, via: str | None) -> str:
    """Where a parent is: HOST:PORT, or its name behind a broker.

    Raises:
        ValueError: `via` is no broker, or `parent` no name.
    """
    if via is None:
        return parent
    from polytier.engines.network.transport import MQTT, check_address

    if not via.startswith(MQTT):
        raise ValueError(f"--via {via} is no broker; give mqtts://HOST:PORT")
    check_address(via)
    kind, slash, own = parent.partition("/")
    if parent != "server" and not (slash and own and kind.rstrip("0123456789") == "team"):
        raise ValueError(f"--parent {parent} is no name; with --via give server, or team/NAME (team1/NAME, ...)")
    return f"{via}/{parent}"


def device_of(name: str) -> str:
    """The name of a device, from its address."""
    kind, _, own = name.partition("/")
    if kind != "device" or not own:
        raise ValueError(f"--job is for devices (device/NAME), not for {name}; edit the roster of the job by hand")
    return own


def check_address(name: str) -> None:
    """Raise an error unless this names a node."""
    kind, slash, own = name.partition("/")
    kinds = ("device", "team", "gateway", "broker")
    if name != "server" and not (slash and own and kind.rstrip("0123456789") in kinds):
        raise ValueError(
            f"{name!r} is no node; give server, device/NAME, team/NAME (team1/NAME, ...), gateway/NAME or broker/NAME"
        )
