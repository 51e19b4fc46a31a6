"""The records that a run writes: results with their intervals, progress, curves, videos, transcripts, a timeline.

`progress` prints lines and writes metrics.jsonl and TensorBoard's files, `loggers` W&B's and trackio's. `results`
writes results.json, episodes.csv and comparison.json, also of an interrupted evaluation. `success_stats` computes
rates, intervals and paired differences, and puts them into words. `videos` records episodes as mp4 files, `timeline`
writes trace.json. Pages are made from these files by `reporting`.
"""
