"""Episodes that an expert of the task plays."""

from embodied.core.types import Job
from embodied.envs.player import EpisodePlayer, Tally, play_episodes
from embodied.envs.sim_worker import ExpertActions
from embodied.runtime import Timers


def played_by_expert(env, episodes, *name):
    """The results, in the order in which the episodes end."""
    player, tally = EpisodePlayer(env, Timers()), Tally(Job(episodes))
    list(play_episodes(player, tally, episodes, ExpertActions(env.expert(*name), player)))
    return tally.finished
