"""The costs of a recipe's parts on these devices, in one file (a profile) for plan, benchmark and placement=auto.

    who measures              what                                                    where in the profile
    role_probe (measure)      seconds and bytes of each part by size, alone           costs
    timed_run (measure)       short real iterations: waits, transfers, weight sync    costs, sync, link, runs
    timed_run (benchmark)     iterations of every mode and schedule, in turns         runs

`stored_profiles` finds the profile of a recipe. `embodied.plan` predicts every layout from the costs and shows the
runs beside the predictions; `placement=auto` takes the predicted fastest, or the fastest run if that one was timed.
"""
