"""Pages made from the records of runs.

`run_page` makes report.html and `comparison_page` comparison.html from the `runs` on disk, `seed_sets_page` and
`benchmark_page` pages of several runs; `sections` and `transcripts_page` hold what they share. They gather tables and
series as JSON; `page` writes them into an HTML file with a script that draws them.
"""

from importlib import import_module

PUBLIC = {
    "VideoWriter": "embodied.records.videos",
    "comparison": "embodied.reporting.comparison_page",
    "read_results": "embodied.records.results",
    "read_run": "embodied.reporting.runs",
    "summarize": "embodied.records.success_stats",
    "wilson": "embodied.records.success_stats",
    "write_report": "embodied.reporting.run_page",
}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> object:
    """A public name, imported on first use: sim workers that write videos need no report pages."""
    if name in PUBLIC:
        return getattr(import_module(PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
