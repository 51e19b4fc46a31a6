"""Pages made from the records of runs.

`run_page` makes report.html and `comparison_page` comparison.html from the `runs` on disk, `seed_sets_page` a page of
several runs; `sections` holds what they share. They gather tables and series as JSON; `page` writes them into an HTML
file with a script that draws them.
"""
