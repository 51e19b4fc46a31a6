"""Short runs in float64 of which a test plays the iterations one by one, and strikes at their workers."""

import os
import signal
from dataclasses import replace

from embodied.config.recipe import load
from embodied.placement import make_plan
from embodied.policies.policy_folder import read_weights
from embodied.run import launch
from embodied.run.devices import divides_requests
from embodied.workflows import roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop

ITERATIONS = 6
SHORT = (
    "env.num_envs=8 env.dtype=float64 env.max_episode_steps=12 policy.dtype=float64 policy.hidden=[16,16] "
    f"faults.timeout_s=240 faults.hang_s=20 run.iterations={ITERATIONS}"
).split()
PPO = ["recipe=pointmass_ppo", *SHORT, "algo.rollout_decisions=16", "algo.minibatch_size=32", "run.env_steps=null"]
GRPO = ["recipe=pointmass_grpo", *SHORT, "algo.groups=5", "algo.group_size=3", "algo.minibatch_size=40"]
ONE_STEP = ["algo.epochs=1", "algo.minibatch_size=null"]
TWO_SIMS = {"sim": "cpu:0-1*2", "policy": "cpu:2", "learner": "cpu:3"}
TWO_LEARNERS = {"sim,policy": "cpu:0-1*2", "learner": "cpu:2-3*2"}


class Run:
    """A loop that was started, with its first weights published."""

    usual = ()  # arguments, where a test gives no others

    def __init__(self, folder, *arguments, placement=TWO_SIMS, backend="inline", kind=EmbodiedLoop, start=None):
        changed = {argument.partition("=")[0] for argument in arguments}
        usual = [argument for argument in self.usual if argument.partition("=")[0] not in changed]
        self.config = load([*usual, *arguments, f"cluster.backend={backend}"]).config
        shared = divides_requests(self.config)
        how = (self.config.env.num_envs, self.config.pipeline.stages)
        roles = [role.name for role in roles_of_run(kind, self.config)]
        gpus = self.config.policy.worker_gpus
        plan = make_plan(placement, (0, 1, 2, 3), *how, shared=shared, roles=roles, policy_gpus=gpus)
        self.plan = replace(plan, hosts=tuple(replace(host, cores=()) for host in plan.hosts))
        self.folder, self.kind, self.lines, self.start = folder, kind, [], start

    def __enter__(self):
        self.cluster = launch.cluster(self.config, self.plan, self.folder, program=self.kind)
        self.loop = self.kind(self.config, self.cluster, notify=self.lines.append, start_folder=self.start)
        self.loop.publish(0)
        return self

    def __exit__(self, *args):
        self.cluster.__exit__(*args)

    def iterate(self, number):
        return self.loop.iterate(number, self.config.run.iterations)

    def play(self, first=0, last=None):
        """The episodes and numbers of these iterations."""
        return [self.iterate(number) for number in range(first, last or self.config.run.iterations)]

    def train(self):
        return [numbers for _, numbers in self.play()]

    def pid(self, worker):
        """Of the process that runs this worker now."""
        return int(
            self.cluster._backend.describe_host(self.cluster._host_of(worker)).split(",")[0].removeprefix("pid ")
        )

    def weights(self):
        self.loop.save_learners(self.folder / "saved")
        return read_weights(self.folder / "saved" / "policy")


def strike(run, moment, worker, how=signal.SIGKILL):
    """SIGKILL at the next moment of this kind: before players are asked to play a round, when they were asked, when
    learners are asked to update or to publish, or policies to load."""
    target, name = {
        "update": (run.loop.collector, "update"),
        "publish": (run.loop.learners, "publish"),
        "load": (run.loop.weight_sync, "_load"),
        "round": (run.loop.rollouts, "_acting"),
        "rollout": (run.loop.rollouts, "_wait_for_deaths"),
    }[moment]
    method = getattr(target, name)

    def struck(*args, **kwargs):
        setattr(target, name, method)
        result = method(*args, **kwargs) if moment in ("publish", "round") else None
        os.kill(run.pid(worker), how)
        return method(*args, **kwargs) if result is None else result

    setattr(target, name, struck)
