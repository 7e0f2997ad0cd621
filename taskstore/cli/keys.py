"""The commands that look after the keys that seal payloads."""

import secrets

import typer

from taskstore.cipher import KEY_BYTES
from taskstore.cli import output
from taskstore.cli.commands import AsJson, Prefix, Schema, Url, app, command, count_tasks, recovery_of
from taskstore.cli.target import KEYS_VARIABLE, Target
from taskstore.schema import DEFAULT_PREFIX

keys = typer.Typer(no_args_is_help=True, help="Make keys, and seal payloads again under a new one.")
app.add_typer(keys, name="keys")


@command("new", f"export {KEYS_VARIABLE}=$(taskstore keys new)", of=keys)
def new_command() -> None:
    """Print a new key: 32 random bytes in hexadecimal digits. Keep it safe, and apart from the data."""
    typer.echo(secrets.token_bytes(KEY_BYTES).hex())


@command("rotate", f"{KEYS_VARIABLE}=NEW,OLD taskstore keys rotate sqlite:///tasks.db", of=keys)
def rotate_command(url: Url, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX, schema: Schema = None) -> None:
    """Seal every payload under the first key; servers may work on meanwhile.

    First give every server the new key in front of the old one, then rotate, then take the old key away.
    """
    target = Target(url, prefix, schema)
    if not target.options().keys:
        raise typer.BadParameter(f"there is no key in {KEYS_VARIABLE}; the first of them seals, all of them open.")
    with target.current() as database, output.progress_bar("Rotating", output.console(stderr=True)) as bar:
        task = bar.add_task("", total=count_tasks(database))
        report = recovery_of(database, target).rotate_keys(progress=lambda done: bar.update(task, completed=done))
    if as_json:
        output.print_json({"resealed": report.resealed})
    else:
        typer.echo(f"{output.count(report.resealed, 'task', 'tasks')} sealed again.")
