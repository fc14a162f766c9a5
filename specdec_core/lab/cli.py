"""``specdec``: the command line. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from specdec_core.errors import SpecDecError

from .policies import command as policies

if TYPE_CHECKING:
    from .run import RunResult

app = typer.Typer(
    help="Decide whether speculative decoding pays: run the loop, run the notebooks, look at the runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
model_app = typer.Typer(help="The default model.", no_args_is_help=True)
app.add_typer(model_app, name="model")
out = Console(highlight=False)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue or answer.")],
    pair: Annotated[str, typer.Option(help="Pair of target and draft: a YAML file.")] = "params/models/smollm2.yaml",
    drafter: Annotated[
        str | None, typer.Option(help="prompt_lookup, suffix, model, composite, early_exit or self; else the pair's.")
    ] = None,
    gamma: Annotated[int | None, typer.Option(min=1, max=64, help="Tokens drafted per step; else the pair's.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 switches it off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 switches it off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 switches it off.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same tokens.")] = 0,
    rule: Annotated[str | None, typer.Option(help="token or block, when sampling.")] = None,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="Tokens tried at each position, of a model draft; else the pair's.")
    ] = None,
    model_gamma: Annotated[
        int | None, typer.Option(min=1, help="Longest block of a composite's model; else the pair's.")
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(min=0, help="A model's block ends where its q is below; else the pair's.")
    ] = None,
    control: Annotated[
        str | None, typer.Option(help="fixed, heuristic, adaptive or fallback; else the pair's.")
    ] = None,
    no_baseline: Annotated[bool, typer.Option("--no-baseline", help="Skip ordinary decoding beside it.")] = False,
) -> None:
    """Speculate on one prompt: accepted, rejected and resampled tokens, beside ordinary decoding."""
    from .show import show_generate

    show_generate(
        prompt,
        pair=pair,
        drafter=drafter,
        gamma=gamma,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        seed=seed,
        rule=rule,
        candidates=candidates,
        model_gamma=model_gamma,
        confidence=confidence,
        control=control,
        baseline=not no_baseline,
    )


@app.command()
def run(
    notebook: Annotated[str | None, typer.Argument(help="For example 00_quickstart.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every notebook, in order.")] = False,
    profile: Annotated[str, typer.Option(help="smoke, cpu, gpu or full: a file in params/NOTEBOOK.")] = "cpu",
    parameter: Annotated[list[str] | None, typer.Option("-p", metavar="KEY=VALUE", help="Set a parameter.")] = None,
    timeout: Annotated[float | None, typer.Option(metavar="MIN", min=0.01, help="Limit in minutes.")] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Also keep the executed copy here.")] = None,
) -> None:
    """Execute notebooks; each is a run in MLflow with all that produced it."""
    if all_ == (notebook is not None):
        raise SpecDecError("Name one notebook, or give --all: specdec run 00_quickstart, or specdec run --all.")
    if all_ and (parameter or out_file):
        raise SpecDecError("-p and --out belong to one notebook: name it instead of --all.")
    from .run import run_all, run_notebook

    seconds = timeout * 60 if timeout else None
    if all_:
        results = run_all(profile, timeout_s=seconds)
    else:
        with out.status(f"{notebook} ({profile})"):
            results = [run_notebook(str(notebook), profile, parameter or (), out=out_file, timeout_s=seconds)]
    _report(results)
    raise typer.Exit(max(result.exit_code for result in results))


def _report(results: list[RunResult]) -> None:
    """A table of the runs, where to look, and for each that failed its one line on stderr."""
    from .ui import links, run_link

    table = Table("notebook", "status", "minutes", "finding", title="Runs")
    for result in results:
        colour = "green" if result.status == "FINISHED" else "red"
        note = result.note if result.status == "FINISHED" else "see below"
        table.add_row(result.notebook, f"[{colour}]{result.status}[/]", f"{result.seconds / 60:.1f}", note)
    out.print(table)
    recorded = [(result, result.store) for result in results if result.store is not None]
    if recorded:
        out.print("Where to look: [bold]make ui[/] (or specdec ui), then", soft_wrap=True)
        out.print("  all runs:", next(links(recorded[0][1]))[1], soft_wrap=True)
    for result, store in recorded:
        out.print(f"  {result.notebook}: {run_link(store, result.run_id)}", soft_wrap=True)
    for result in results:
        if result.status != "FINISHED":
            reason = result.note.removeprefix(f"{result.notebook}: ")
            err.print(f"{result.notebook} {result.status}: {reason}", markup=False)


@app.command()
def sweep(
    file: Annotated[str, typer.Argument(help="A YAML file of params/sweeps, or its name.")],
    workers: Annotated[int | None, typer.Option(min=1, help="Cells that run at once; else the file's.")] = None,
) -> None:
    """Execute a notebook for every cell of a grid, as runs under one parent; resumes where it was stopped."""
    from .sweeps import command

    raise typer.Exit(command(file, workers))


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535)] = 5000,
    print_: Annotated[bool, typer.Option("--print", help="Print the links and serve nothing.")] = False,
) -> None:
    """Serve the MLflow UI on 127.0.0.1 and print the links worth opening."""
    from .store import open_store
    from .ui import links, prepare, serve

    store = open_store() if print_ else prepare(port)
    for what, address in links(store, port):
        out.print(f"{what}\n  {address}", soft_wrap=True, markup=False)
    if not print_:
        out.print("Ctrl-C ends it.")
        serve(store, port)


@app.command()
def doctor() -> None:
    """What this machine can do, and what to mend."""
    from .doctor import report
    from .store import open_store, reap

    rows = list(report())
    table = Table("", "what", "found", "to mend", title="specdec doctor")
    for what, value, ok, mend in rows:
        mark = {True: "[green]ok[/]", False: "[red]mend[/]", None: "-"}[ok]
        table.add_row(mark, what, str(value), "" if ok else str(mend or ""))
    out.print(table)
    ill = any(ok is False for _, _, ok, _ in rows)
    try:
        if orphans := reap(open_store()):
            out.print(f"{len(orphans)} run(s) whose process had died are now marked KILLED.")
    except SpecDecError as error:
        err.print(str(error), markup=False)
        ill = True
    raise typer.Exit(int(ill))


@app.command()
def bench(
    profile: Annotated[
        str,
        typer.Option(help="loop: what the loop itself costs. cpu: what speculation gains here, beside other engines."),
    ] = "loop",
    pair: Annotated[str, typer.Option(help="Pair of target and draft: a YAML file, or its name.")] = "smollm2",
    batches: Annotated[str, typer.Option(help="loop: batch sizes, with commas.")] = "1,2,4,8",
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1, help="loop: groups of prompts at batch 1 (6). cpu: prompts of a category in each half (1)."
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=16, help="Most tokens of a text: loop 48, cpu 64.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="loop: float32, bfloat16, float16 or auto; else the pair's own. cpu takes several."),
    ] = None,
    data: Annotated[
        str, typer.Option(help="cpu: prompts, 'builtin' or a JSONL file such as Spec-Bench's.")
    ] = "builtin",
    minutes: Annotated[
        float, typer.Option(min=1, help="cpu: about how long; texts get shorter where it would take longer.")
    ] = 10.0,
) -> None:
    """Measure with arms interleaved; the table is a run in MLflow."""
    from . import bench, speed

    if profile not in ("loop", "cpu"):
        raise SpecDecError(f"--profile {profile} is unknown: give loop or cpu.")
    if profile == "loop":
        bench.command(pair, batches, prompts or 6, tokens or 48, dtype)
    else:
        speed.command(pair, data, tokens or 64, prompts or 1, minutes)


@app.command()
def publish(run: Annotated[str, typer.Argument(help="Id of a finished `specdec bench --profile cpu`.")]) -> None:
    """Show a bench's table in the README and keep it in results/."""
    from .publish import publish as show

    show(run)


@app.command()
def mutants() -> None:
    """Plant known faults in the loop, one at a time, and show which check catches each."""
    from .mutants import command

    command()


app.command("policies")(policies)


@model_app.command("fetch")
def model_fetch() -> None:
    """Fetch and convert the default target into the model cache; does nothing when it is there."""
    from .models import fetch_default

    out.print(f"default model: {fetch_default()}", soft_wrap=True, markup=False)


def _check_encoding(arguments: list[str]) -> None:
    """Bytes that are no UTF-8 reach us as lone surrogates, which neither a tokenizer nor the record can write."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise SpecDecError(f"{ascii(argument)[:80]} is not valid UTF-8: give the text in UTF-8.") from None


def main() -> None:
    """Entry point: an error that a user can mend is one line, without a traceback."""
    try:
        _check_encoding(sys.argv[1:])
        app()
    except SpecDecError as error:
        err.print(str(error), markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
