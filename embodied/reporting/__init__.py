"""Pages made from the records of runs.

`run_page` makes report.html and `comparison_page` comparison.html from the `runs` on disk, `seed_sets_page` and
`benchmark_page` pages of several runs, `run_list` the list of `embodied.ui`; `sections` and `transcripts_page` hold
what they share. They gather tables and series as JSON; `page` writes them into an HTML file with a script that draws
them. `rerun_file` writes an episode for another viewer.
"""
