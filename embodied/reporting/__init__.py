"""Progress on the console, results with their intervals, videos and reports.

`progress` prints lines and writes metrics.jsonl and TensorBoard's files, `wandb_logger` W&B's and trackio's. `results`
writes results.json, episodes.csv and comparison.json, `partial_evaluation` an interrupted evaluation. `success_stats`
computes rates, intervals and paired differences. `videos` writes mp4 files, `video_recorder` records episodes while
they are played, `timeline` writes trace.json. `run_page` makes report.html and `comparison_page` comparison.html from
the `runs` on disk, with sections of `training_page`, `evaluation_page` and `machine_page`. These gather tables and
series as JSON; `page` writes them into an HTML file with a script that draws them.
"""

from importlib import import_module

PUBLIC = {
    "VideoWriter": "videos",
    "comparison": "comparison_page",
    "read_results": "results",
    "read_run": "runs",
    "summarize": "success_stats",
    "wilson": "success_stats",
    "write_report": "run_page",
}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> object:
    """A public name, imported on first use: sim workers that write videos need no report pages."""
    if name in PUBLIC:
        return getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
