"""A request's records as an MLflow trace: written afterwards, so it costs nothing while tokens are made."""

from __future__ import annotations

import logging
import os
from typing import Any

from .masking import mask
from .store import Store

STAGES = ("draft", "score", "accept", "resample", "repeat")
_NANO = 1_000_000_000
# What each stage consumed, changed, and shows for it.
_FACTS = {
    "draft": ("gamma", "drafted", "draft_tokens", "q", "q_entropy", "control", "reason", "synthetic"),
    "score": ("verified", "context", "p", "p_entropy"),
    "accept": ("accepted", "branch", "preferred"),
    "resample": ("last", "emitted"),
    "repeat": ("emitted", "stop", "context"),
}


def write_trace(store: Store, run_id: str, output: Any, name: str) -> str:
    """One root span for the request, one span per step, one per stage of it. Returns the trace id."""
    import mlflow

    logging.getLogger("mlflow.tracing.export.async_export_queue").setLevel(logging.WARNING)
    given = os.environ.pop("MLFLOW_TRACKING_URI", None)
    mlflow.set_tracking_uri(store.uri)  # the exporter knows no other way to be told
    os.environ.pop("MLFLOW_TRACKING_URI", None)  # which it writes here too, where it would look like the user's wish
    if given is not None:
        os.environ["MLFLOW_TRACKING_URI"] = given
    mlflow.tracing.disable_notebook_display()  # type: ignore[no-untyped-call]
    records, client = list(output.records), store.client
    began = _ns(records[0].started) if records else None
    root = client.start_trace(
        name,
        span_type="CHAIN",
        inputs={"prompt": mask(str(output.prompt))},
        attributes={"stop": str(output.stop), "tokens": str(len(output.tokens)), "steps": str(len(records))},
        experiment_id=store.experiment_id,
        start_time_ns=began,
        run_id=run_id,
    )
    end = began
    for record in records:
        end = _write_step(client, root, record)
    metrics = {key: value for key, value in dict(output.metrics).items() if isinstance(value, int | float)}
    result = {"text": mask(str(output.text)), "metrics": metrics}
    client.end_trace(root.trace_id, outputs=result, end_time_ns=end)
    mlflow.flush_trace_async_logging()
    return str(root.trace_id)


def _write_step(client: Any, root: Any, record: Any) -> int:
    """The spans of one step, stage after stage. Returns when the step ended (ns since the epoch)."""
    clock = _ns(record.started)
    step = client.start_span(
        f"step {record.step}: {record.kind}, {record.accepted}/{record.verified} accepted",
        trace_id=root.trace_id,
        parent_id=root.span_id,
        span_type="AGENT",
        start_time_ns=clock,
    )
    for stage in STAGES:
        if stage not in record.seconds:
            continue
        span = client.start_span(
            stage,
            trace_id=root.trace_id,
            parent_id=step.span_id,
            span_type="TOOL",
            attributes={key: _plain(getattr(record, key)) for key in _FACTS[stage]},
            start_time_ns=clock,
        )
        clock += _ns(record.seconds[stage])
        client.end_span(root.trace_id, span.span_id, end_time_ns=clock)
    client.end_span(root.trace_id, step.span_id, outputs={"emitted": _plain(record.emitted)}, end_time_ns=clock)
    return clock


def _ns(seconds: float) -> int:
    return int(seconds * _NANO)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return mask(value) if isinstance(value, str) else value
