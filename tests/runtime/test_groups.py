import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from embodied.core.errors import ChannelClosed, DeadlineExceeded, WorkerFailed
from embodied.runtime import Cluster, HostPlan, Worker, served_while_busy
from embodied.runtime.host import rank_is_lost
from embodied.runtime.payload import own_gpu
from embodied.runtime.rendezvous import RendezvousFile


class Counter(Worker):
    def __init__(self, start=0):
        self.total = start + self.rank

    def add(self, amount, scale=1):
        self.total += amount * scale
        return self.total

    def who(self):
        return self.name, self.rank, self.world_size

    def environment(self):
        cores = {core for thread in os.listdir("/proc/self/task") for core in os.sched_getaffinity(int(thread))}
        names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "EMBODIED_DEVICE")
        return *map(os.environ.get, names), sorted(cores)  # of every thread

    def sleep(self, seconds):
        with self.timers.measure("nap"):
            time.sleep(seconds)

    def sleep_until(self, channel):
        while not channel.qsize():
            time.sleep(0.05)

    def sleep_and_tick(self, seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.05)
            self.tick()

    def pid(self):
        return os.getpid()

    def fail(self, message, channel=None):
        raise KeyError(message)

    def close_then_fail(self, channel):
        channel.close("sorry")
        time.sleep(1.0)  # as under load: what follows from it is reported first
        raise RuntimeError("broken gripper")

    def die(self, number=signal.SIGKILL, channel=None):
        os.kill(os.getpid(), number)
        time.sleep(10)

    def put_then_fail(self, channel):
        channel.put("said before")
        raise RuntimeError("broken gripper")

    def get(self, channel):
        return channel.get()

    def get_and_put(self, inbox, out):
        while True:
            out.put(inbox.get())

    def unsendable(self):
        return lambda: None


class Together(Worker):
    """Ranks that work together: what one sees of another's death is a broken connection, and it may see that first."""

    def work(self, channel, rendezvous):
        from embodied.runtime.collective import Gloo  # with torch

        ranks = Gloo(rendezvous, self.rank, self.world_size)
        if self.rank == 0:
            ranks.gather(np.zeros(1))
        del ranks
        channel.get()
        os._exit(3)


class Light(Worker):
    def modules(self):
        return set(sys.modules)


class Busy(Worker):
    """Does nothing but wait until a test lets it go on."""

    def __init__(self, begin):
        begin.get()

    def work(self, release):
        return release.get()

    @served_while_busy
    def state(self):
        return "here"


class Broken(Worker):
    def __init__(self):
        raise RuntimeError("no display found")

    def work(self): ...


def three(backend, **options) -> Cluster:
    return Cluster(backend, [HostPlan(f"h{i}", ("count", f"role{i}")) for i in range(3)], timeout_s=300, **options)


@pytest.fixture
def counters(backend):
    with three(backend) as cluster:
        yield cluster.launch(Counter, "count", start=10)


def test_calls_on_a_group_reach_every_rank_with_its_arguments(counters):
    """One cluster for all that only reads, as starting one takes a moment."""
    assert counters.who().wait() == [("count-0", 0, 3), ("count-1", 1, 3), ("count-2", 2, 3)]
    assert counters.add(1, scale=2).wait() == [12, 13, 14]
    assert counters[1].add(0).wait() == [13]
    assert counters[1:].add(0).wait() == [13, 14]
    assert counters.add.each([(1,), {"amount": 2}, (3,)]).wait() == [13, 15, 17]
    assert counters.call("add", [((1,), {"scale": 10}), ((0,), {}), ((0,), {})]).wait() == [23, 15, 17]
    assert len(counters) == 3
    with pytest.raises(ValueError, match="arguments for 2 ranks, but there are 3"):
        counters.add.each([(1,), (2,)])
    with pytest.raises(AttributeError, match="Counter has no method 'ad'; it has: add, "):
        counters.ad(1)
    with pytest.raises(IndexError, match="no rank 3"):
        counters[3]


def test_an_array_given_to_all_reduce_may_change_before_other_ranks_read_it():
    told = []
    rank = SimpleNamespace(name="critic-0", rank=0, world_size=1, broadcast=lambda item, *_: told.append(item))
    mine = np.ones(2)
    Worker.all_reduce(rank, mine)
    mine[:] = 5
    assert told[0].tolist() == [1, 1]


def test_calls_of_a_worker_run_one_after_the_other(counters):
    handles = [counters[0].add(1) for _ in range(50)]
    assert [handle.wait() for handle in handles] == [[i] for i in range(11, 61)]


@pytest.mark.parametrize("named", [False, True])
def test_a_question_does_not_wait_for_the_work_before_it_even_where_the_class_is_only_named(backend, named):
    """Both are asked while the worker is still under construction, and the driver may not know its class."""
    with Cluster(backend, [HostPlan("h", ("busy",))], timeout_s=300) as cluster:
        begin, release = cluster.channel("begin"), cluster.channel("release")
        busy = cluster.launch(f"{__name__}:Busy" if named else Busy, "busy", begin)
        work, question = busy.work(release), busy.state()
        begin.put(None)
        assert question.wait(timeout_s=300) == ["here"]
        assert not work.done()
        release.put("done")
        assert work.wait() == ["done"]


def test_a_call_that_missed_its_deadline_can_be_waited_for_again(backend):
    with three(backend) as cluster:
        counters, go_on = cluster.launch(Counter, "count"), cluster.channel("go on")
        counters.who().wait()
        handle = counters[0].get(go_on)
        assert not handle.done()
        late = r"count.get did not finish within 0\.05 s on count-0(.|\n)*last sign"
        with pytest.raises(DeadlineExceeded, match=late):
            handle.wait(timeout_s=0.05)
        go_on.put("late")
        assert handle.wait() == ["late"]


def test_a_wait_lasts_as_long_as_there_are_signs_of_life(backend):
    with Cluster(backend, [HostPlan("h0", ("count",))], timeout_s=3) as cluster:
        counters, go_on = cluster.launch(Counter, "count"), cluster.channel("go on")
        counters.who().wait(60)
        counters.sleep_and_tick(4).wait()
        silent = counters.sleep_until(go_on)
        with pytest.raises(DeadlineExceeded, match=r"count.sleep_until did not finish within 3 s on count-0"):
            silent.wait()
        go_on.put(None)
        while not silent.done():
            time.sleep(0.01)


def test_an_exception_is_reported_with_its_place_and_its_traceback(backend, tmp_path):
    with three(backend, log_dir=tmp_path) as cluster:
        counters = cluster.launch(Counter, "count")
        with pytest.raises(WorkerFailed) as failed:
            counters[1].fail("no_such_joint").wait()
        assert str(failed.value).startswith("count-1: fail failed: KeyError: 'no_such_joint' (test_groups.py:"), (
            failed.value
        )
        assert "\n" not in str(failed.value)
        assert "raise KeyError(message)\nKeyError: 'no_such_joint'" in str(failed.value.__cause__)
        if backend != "inline":
            assert str(tmp_path / "h1.log") in str(failed.value)
            assert "raise KeyError(message)" in (tmp_path / "h1.log").read_text()
        assert counters.add(1).wait() == [1, 2, 3]  # it was told, and the worker lives


def test_an_exception_is_reported_even_if_the_disk_has_no_room_for_the_log(processes, tmp_path):
    (tmp_path / "h1.log").symlink_to("/dev/full")
    with three(processes, log_dir=tmp_path) as cluster:
        counters = cluster.launch(Counter, "count")
        with pytest.raises(WorkerFailed, match="KeyError: 'no_such_joint'"):
            counters[1].fail("no_such_joint").wait()
        assert counters.add(1).wait() == [1, 2, 3]


def test_an_object_that_cannot_be_pickled_is_a_failure(counters, backend):
    handle = counters.unsendable()
    if backend != "inline":
        with pytest.raises(WorkerFailed, match=r"unsendable failed: .*pickle"):
            handle.wait()
        with pytest.raises(Exception, match="pickle"):
            counters.add(lambda: None)


def test_a_failing_constructor_is_the_first_cause_of_any_wait(backend):
    with three(backend) as cluster:
        counters, broken = cluster.launch(Counter, "count"), cluster.launch(Broken, "role1")
        with pytest.raises(WorkerFailed, match="role1-0: constructor failed: RuntimeError: no display found"):
            broken.work().wait()
        for _ in range(2):
            with pytest.raises(WorkerFailed, match="role1-0: constructor failed"):
                counters.sleep(0.2).wait()
        started = time.monotonic()
    assert time.monotonic() - started < 60, "of the 600 s for which a wait may last"


def test_the_first_cause_wins_over_what_follows_from_it(backend, monkeypatch):
    with three(backend) as cluster:
        monkeypatch.setattr(cluster._backend, "notice_s", 60.0)  # which is waited where none is known
        first, second, third = (cluster.launch(Counter, f"role{i}") for i in range(3))
        one, two = cluster.channel("one", home=second), cluster.channel("two", home=third)
        for group in (first, second, third):
            group.who().wait()
        last, middle = third.get(two), second.get_and_put(one, two)
        first.fail("root", one)
        started = time.monotonic()
        for handle in (last, middle):
            with pytest.raises(WorkerFailed, match="role0-0: fail failed: KeyError: 'root'"):
                handle.wait()
        with pytest.raises(ChannelClosed, match=r"closed by role1-0: get_and_put failed: .*closed by role0-0.*root"):
            two.get()
        assert time.monotonic() - started < 30


def test_a_worker_that_closes_a_channel_and_then_fails_is_the_cause(backend):
    with three(backend) as cluster:
        first, second = cluster.launch(Counter, "role0"), cluster.launch(Counter, "role1")
        channel = cluster.channel("one", home=second)
        waiting = second.get(channel)
        first.close_then_fail(channel)
        with pytest.raises(WorkerFailed, match="role0-0: close_then_fail failed: RuntimeError: broken gripper"):
            waiting.wait()


def test_items_that_a_worker_put_before_its_failure_can_be_read(backend):
    with three(backend) as cluster:
        channel, worker = cluster.channel("reports", capacity=None), cluster.launch(Counter, "role0")
        if backend == "local":  # the failure is reported while the item waits to be read
            cluster._backend.channels.submit(lambda: time.sleep(0.2))
        with pytest.raises(WorkerFailed, match="broken gripper"):
            worker.put_then_fail(channel).wait()
        assert channel.get() == "said before"
        with pytest.raises(ChannelClosed, match="closed by role0-0: put_then_fail failed"):
            channel.get()


def test_the_death_of_a_rank_is_named_as_the_cause_and_not_the_earlier_errors_of_its_peers(tmp_path):
    hosts = [HostPlan(f"h{i}", ("pair",)) for i in range(2)]
    with Cluster("local", hosts, log_dir=tmp_path, timeout_s=300) as cluster:
        pair, meet = cluster.launch(Together, "pair"), cluster.rendezvous("pair")
        handle = pair.work.each([(None, meet), (channel := cluster.channel("go"), meet)])

        def let_die():
            while not handle.failed:
                time.sleep(0.01)
            channel.put(1)

        (dying := threading.Thread(target=let_die)).start()
        with pytest.raises(WorkerFailed, match=r"pair-1: its process exited with code 3 during pair\.work"):
            handle.wait()
        dying.join(60)


def test_a_killed_host_is_reported_with_signal_process_cores_and_log(processes, tmp_path):
    core = min(os.sched_getaffinity(0))
    hosts = [HostPlan("one", ("count",), cores=(core,)), HostPlan("two", ("count", "other"))]
    with Cluster(processes, hosts, log_dir=tmp_path, timeout_s=300) as cluster:
        counters, other = cluster.launch(Counter, "count"), cluster.launch(Counter, "other")
        channel = cluster.channel("from one", home=other)
        blocked, pid = other.get(channel), counters[0].pid().wait()[0]
        dying = counters[0].die(signal.SIGSEGV, channel)
        cause = (
            rf"count-0: its process was killed by SIGSEGV during count\.die \[pid {pid}, cores {core}, log: .*one\.log"
        )
        for handle in (blocked, dying, counters.add(1)):
            with pytest.raises(WorkerFailed, match=cause):
                handle.wait()
        with pytest.raises(ChannelClosed, match="closed by count-0: its process was killed"):
            channel.get()
        assert "Segmentation fault" in (tmp_path / "one.log").read_text()


def test_a_channel_whose_home_died_is_closed_with_the_cause(processes):
    with three(processes) as cluster:
        first, second = cluster.launch(Counter, "role0"), cluster.launch(Counter, "role1")
        channel = cluster.channel("at second", home=second)
        blocked = first.get(channel)
        second.die()
        with pytest.raises(WorkerFailed, match="role1-0: its process was killed by SIGKILL"):
            blocked.wait()
        with pytest.raises(ChannelClosed, match="role1-0"):
            channel.put(1)


def test_an_idle_host_that_dies_is_noticed(processes):
    with three(processes) as cluster:
        counters = cluster.launch(Counter, "count")
        os.kill(counters[2].pid().wait()[0], signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="count-2: its process was killed by SIGKILL"):
            counters[0].get(cluster.channel("never")).wait()


@pytest.mark.as_users_do
def test_a_host_gets_its_environment_before_it_imports_anything(processes, monkeypatch):
    monkeypatch.setenv("EMBODIED_DEVICE", "gpu:0")  # says the user's shell, and it is not for it to say
    core = max(os.sched_getaffinity(0))
    plan = HostPlan("one", ("count",), cores=(core,), threads=3, env={"CUDA_VISIBLE_DEVICES": "7"})
    with Cluster(processes, [plan], timeout_s=300) as cluster:
        assert cluster.launch(Counter, "count").environment().wait() == [("3", "7", "", [core])]
        assert own_gpu() == "", "nor is the driver told"


@pytest.mark.as_users_do
def test_a_host_starts_without_heavy_imports(processes):
    with Cluster(processes, [HostPlan("one", ("count",))], timeout_s=300) as cluster:
        heavy = {"torch", "mani_skill", "sapien", "ray", "pydantic"}
        assert heavy.isdisjoint(cluster.launch(Light, "count").modules().wait()[0])


def test_wrong_plans_are_refused():
    one = HostPlan("one", ("count",))
    with pytest.raises(ValueError, match="must differ"):
        Cluster("inline", [one, one])
    with pytest.raises(ValueError, match=r"backend='mpi' is unknown; known: auto, inline, local, ray"):
        Cluster("mpi", [one])
    with pytest.raises(ValueError, match=r"host far is to run on cores 9000-9001, but this process may use only"):
        Cluster("local", [HostPlan("far", ("count",), cores=(9000, 9001))])
    with Cluster("inline", [one]) as cluster:
        with pytest.raises(ValueError, match="no host runs the role 'sims'; the plan has: count"):
            cluster.launch(Counter, "sims")
        counters = cluster.launch(Counter, "count")
        with pytest.raises(ValueError, match="already launched"):
            cluster.launch(Counter, "count")
    with pytest.raises(WorkerFailed, match="after the cluster was closed"):
        counters.add(1)


class Noter(Worker):
    def note_and_wait(self, notes, go_on):
        notes.put("half of it")
        return go_on.get()

    @served_while_busy
    def answer(self):
        return 42


def test_the_driver_notices_notes_and_other_calls_while_a_long_one_goes_on(backend, tmp_path):
    with Cluster(backend, [HostPlan("right", ("b",))], log_dir=tmp_path, timeout_s=300) as cluster:
        worker = cluster.launch(Noter, "b")
        notes, go_on = cluster.channel("notes", capacity=None), cluster.channel("go on", home=worker)
        cluster.watch(notes)
        long = worker.note_and_wait(notes, go_on)
        assert cluster.wait_for_calls(long, until=lambda: notes.qsize() > 0) == {}
        assert notes.get() == "half of it" and not long.done()
        short = worker.answer()
        assert cluster.wait_for_calls(long, until=short.done) == {}
        assert short.wait() == [42] and not long.done()
        go_on.put("the rest")
        assert cluster.wait_for_calls(long, until=lambda: notes.qsize() > 0) == {}
        assert long.wait() == ["the rest"]


def test_an_nccl_error_of_this_rank_is_told_from_the_loss_of_another_rank():
    import torch.distributed as dist

    refused = "NCCL error in: NCCLUtils.cpp:93, invalid usage\nncclInvalidUsage: ...\nDuplicate GPU detected : rank 0"
    lost = "NCCL error in: NCCLUtils.cpp:93, remote process exited or there was a network error\nncclRemoteError: ..."
    assert [rank_is_lost(dist.DistBackendError(text)) for text in (refused, lost)] == [False, True]


def test_a_full_disk_where_ranks_meet_is_not_the_loss_of_another_rank(tmp_path):
    (tmp_path / "ranks-sums").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        RendezvousFile(str(tmp_path / "ranks"), timeout_s=300).store("sums", 2)
    assert not rank_is_lost(caught.value)
