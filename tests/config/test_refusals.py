"""Options that do not go together: one table of what is asked and answered, and every rule has a row in it."""

import re
from functools import cache

import pytest

from embodied.config import recipe
from embodied.config.answers import OURS, USUAL
from embodied.config.read import leaves, root
from embodied.config.recipe import RunConfig, load
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.options import Rule, Strict
from embodied.run import launch, memory_check

SHORT = {"PPO": "pointmass_ppo", "GRPO": "pointmass_grpo", "SUMS": "sums_grpo run.start_from=null"}
SHORT |= {
    "CRITIC": "sums_ppo_critic run.start_from=null",
    "PICTURES": "pictures_grpo run.start_from=null policy.pretrained=null",
}
SHORT |= {"PERIODIC": "pipeline.schedule=periodic", "ONCE": "algo.epochs=1 algo.minibatch_size=null"}
SHORT |= {"ASYNC": "pipeline.schedule=async", "COREMAP": 'placement={"sim,policy":"cpu:0","learner":"cpu:1"}'}
SHORT |= {"FEW": f"{SHORT['SUMS']} env.num_envs=8 algo.groups=4 algo.group_size=4"}
SHORT |= {"SERVER": "policy.engine=http policy.url=http://127.0.0.1:1", "SFT": "sums_sft"}
# What is asked -> part of what is answered
TABLE = """
PPO algo.dual_clip=1.1 -> algo.dual_clip=1.1 is not above 1 + algo.clip_high = 1.2
SFT policy.name=mlp -> env.name=sums asks in words, and policy.name=mlp answers with actions; try policy.name=language
PPO algo.target_kl=0.02 algo.epochs=1 -> algo.target_kl=0.02 does not go with algo.epochs=1: it skips the epochs
PPO algo.minibatch_size=9000 -> =9000 is more than env.num_envs=16 * algo.rollout_decisions=32 = 512 items an iteration
PPO env.num_envs=1 algo.rollout_decisions=1 algo.minibatch_size=1 -> makes a single advantage 0; try algo.rollout_d
PPO algo.kl_in=reward -> algo.kl_in=reward has no effect with algo.kl_coef=0; try algo.kl_coef=0.01
PPO algo.kl_in=reward algo.kl_coef=1 algo.kl_estimator=k2 -> rewards take the divergence as it is (k1)
PPO algo.ratio_cap=4 -> algo.ratio_cap=4 has no effect with algo.clip=two_sided; leave it out, or set algo.clip=aipo
GRPO algo.clip=aipo algo.clip_low=0.1 -> algo.clip_low=0.1 has no effect with algo.clip=aipo: algo.ratio_cap is the
PPO algo.clip=tis algo.dual_clip=3 -> algo.dual_clip=3 has no effect with algo.clip=tis
GRPO algo.name=dapo algo.clip=aipo algo.clip_high=0.2 -> algo.clip_high=0.2 has no effect
GRPO algo.clip=aipo algo.decoupled=true -> try algo.clip=two_sided with algo.importance_cap=2
PPO algo.importance_cap=2 -> with algo.decoupled=false: the ratio would count twice; try algo.decoupled=true
PPO algo.importance_cap=0.5 algo.decoupled=true -> greater than or equal to 1
GRPO algo.episode_mask_high=2 -> with algo.episode_mask=none; leave it out, or set algo.episode_mask=mean
PPO algo.episode_mask=mean -> it needs a bound; try algo.episode_mask_low=0.5 algo.episode_mask_high=2
PPO algo.episode_mask=error algo.episode_mask_low=0.5 -> that is at least 1; take algo.episode_mask_high
PPO algo.episode_mask=mean algo.episode_mask_low=1 -> less than 1
PPO algo.episode_mask=mean algo.episode_mask_high=1 -> greater than 1
PPO algo.clip=aipo algo.ratio_cap=1 -> greater than 1
GRPO algo.gamma=0.9 -> algo.gamma is a key of algo.name=ppo, but algo.name is grpo
GRPO algo.group_size=1 algo.filter=none algo.scale=none -> with algo.baseline=group: there is no other episode
GRPO algo.group_size=1 algo.filter=none algo.baseline=batch -> with algo.scale=group: one return has no deviation
GRPO algo.group_size=1 algo.baseline=batch algo.scale=batch -> try algo.filter=none
GRPO algo.deviation=sample algo.scale=none -> algo.deviation=sample has no effect with algo.scale=none
GRPO algo.name=reinforce++ algo.kl_coef=0.1 algo.deviation=sample -> algo.deviation=sample does not go with algo.kl_in
GRPO algo.kl_coef=0.1 algo.kl_in=reward -> with algo.kl_coef=0.1 and algo.baseline=group: every decision gets its own
GRPO algo.kl_coef=0.1 algo.kl_in=reward algo.baseline=batch -> and algo.scale=group: every decision gets its own return
GRPO algo.filter=none algo.filter_low=0.1 -> algo.filter_low=0.1 has no effect with algo.filter=none
GRPO algo.filter_low=0.9 algo.filter_high=0.1 -> no group would be kept; swap them
GRPO algo.filter_metric=success -> it needs a bound; try algo.filter_low=0.1 algo.filter_high=0.9
GRPO algo.filter_metric=success algo.filter_low=-1 -> bound a rate of success
GRPO algo.surplus=carry -> algo.surplus=carry has no effect with algo.filter=drop; leave it out, or set algo.filter=re
GRPO env.num_envs=500 -> some would never play; try env.num_envs=128
GRPO run.iterations=null run.env_steps=1000 -> run.env_steps=1000 does not go with algo.name=grpo
GRPO env.stagger=true -> it cuts the first episodes short; try env.stagger=false
libero_ppo env.backend=warp env.task=my:Task -> env.backend=warp plays .bddl files and no classes (my:Task)
libero_ppo env.renderer=warp env.fast_images=true -> env.fast_images=true has no effect with env.renderer=warp
PPO env.name=maniskill env.task=PushCube-v1 env.backend=cuda env.renderer=cores -> the GPU draws what it simulates
GRPO env.retries=2 -> all episodes of a group begin alike; try env.retries=0
PPO PERIODIC -> pipeline.schedule=periodic: algo.name=ppo does not go with algo.groups=null: all env rows end a rollout
GRPO PERIODIC -> algo.epochs=4: groups are forgotten at once; try algo.epochs=1; and algo.minibatch_size=256: there is
GRPO PERIODIC ONCE algo.scale=batch -> algo.scale=batch: all returns are known at the end; try algo.baseline=group
GRPO PERIODIC ONCE algo.decoupled=true -> algo.decoupled=true: acting and learning weights are the same; leave it out
GRPO PERIODIC ONCE algo.filter=resample algo.surplus=carry -> try algo.surplus=discard
CRITIC PERIODIC ONCE -> algo.normalize_advantages=true does not go with algo.groups=256: their mean is known at the end
GRPO pipeline.schedule=async algo.filter=resample algo.surplus=carry -> try algo.surplus=discard
PPO pipeline.async_level=2 -> has no effect with pipeline.schedule=sync; leave it out, or set pipeline.schedule=async
PPO pipeline.schedule=async pipeline.granularity=4 -> learners work on an earlier rollout meanwhile; leave it out
PPO pipeline.granularity=33 -> pipeline.granularity=33 is more than algo.rollout_decisions=32
GRPO pipeline.granularity=2 learner.most_items=999 -> learners get groups before the lengths of all groups are known
PPO env.num_envs=9 pipeline.stages=2 -> env.num_envs=9 is not a multiple of pipeline.stages=2; try env.num_envs=8
PPO learner.most_items=5 -> learner.most_items=5 has no effect with algo.name=ppo: in rollouts of a fixed length
GRPO PERIODIC ONCE learner.most_items=5 -> with pipeline.schedule=periodic: learners keep no batch there
PPO policy.name=remote policy.url=ws://h -> policy.name=remote: it learns nothing here
PPO eval.sets={"a":{"file":"a.jsonl"}} -> has no effect with policy.name=mlp: only text envs are asked questions
PPO algo.name=dagger policy.chunk=4 run.env_steps=null run.iterations=2 -> an expert labels one action of a decision
PPO policy.name=exported policy.pretrained=/tmp -> policy.name=exported: it learns nothing here
SUMS policy.engine=http policy.url=http://h:x -> policy.url=http://h:x is no address (Port could not be cast
SUMS policy.engine=http policy.url=http://h:99999999 -> is no address (Port out of range 0-65535)
PPO policy.name=remote policy.url=ws://[ -> policy.url=ws://[ is no address
PPO learner.precision=bf16 policy.dtype=float64 -> bf16 lowers the products of float32; try policy.dtype=float32
pointmass_ppo_pi0_tiny policy.dtype=bfloat16 learner.shard=true -> its norms are float32; try policy.dtype=float32
PPO learner.pack_tokens=64 -> learner.pack_tokens=64 has no effect with policy.name=mlp: only conversations pass
PPO learner.share_prompts=false -> learner.share_prompts=false has no effect
PPO algo.groups=8 algo.group_size=2 -> algo.groups=8 and algo.group_size=2 do not go with algo.name=ppo and policy.na
PPO algo.group_size=4 -> a robot's PPO learns from rollouts of algo.rollout_decisions, not from groups; leave it out
PPO policy.hidden=[] -> policy.hidden=[]: tuple should have at least 1 item after validation, not 0
PPO run.name=LONG -> has 300 bytes; 100 are allowed, since files are named after it
GRPO algo.logprob_level=episode -> only a language model gives answers; leave it out, or set policy.name=language
PPO algo.logprob_level=episode -> only a language model gives answers
GRPO algo.truncated=mask -> only a language model gives answers
GRPO algo.overlong=4 algo.prompts=epochs -> algo.overlong=4 and algo.prompts=epochs have no effect with policy.name=mlp
GRPO algo.weighting=constant -> only a language model gives answers
SUMS algo.pools=[1,1,1] algo.prompts=epochs -> it repeats some prompts; leave one of them out
SUMS algo.pools=[0.1,0.9] -> takes three weights, for prompts that were solved rarely, at times and often
SUMS algo.minibatch_size=36 -> would tear groups of algo.group_size=8; try algo.minibatch_size=32
SUMS algo.overlong=6 -> more than policy.max_tokens=5, so every answer would pay; try algo.overlong=1
SUMS learner.micro_batch_size=4 -> it counts decisions, not conversations; set learner.pack_tokens
SUMS pipeline.stages=2 -> pipeline.stages=2 does not go with policy.name=language: each conversation continues when
CRITIC algo.rollout_decisions=3 -> a decision is a token, and algo.groups counts conversations; leave it out
CRITIC algo.groups=null -> try algo.groups=64 prompts an iteration, or algo.name=grpo
CRITIC policy.value_head=true -> does not go with roles.critic=true: the critic predicts values; leave it out
CRITIC roles.critic=false roles.critic_lr=null -> it needs predicted values; set policy.value_head=true
CRITIC roles.critic=false -> roles.critic_lr=0.0003 has no effect with roles.critic=false; leave it out, or set roles.
CRITIC algo.kl_coef=0.1 algo.kl_in=reward -> set roles.reference=true
SUMS policy.value_head=true -> policy.value_head=true does not go with algo.name=grpo: no values are learned
SUMS roles.reference=true -> has no effect with algo.kl_coef=0; try algo.kl_coef=0.01, or leave it out
SUMS roles.critic=true -> with algo.name=grpo: no other algorithm learns values; try algo.name=ppo
PPO roles.verifier=a:b -> roles.verifier=a:b has no effect with policy.name=mlp: it reads conversations
SUMS roles.verifier=a:b roles.reward_model=m roles.judge=start -> roles.reward_model=m does not go with roles.judge=st
SUMS roles.judge_says=Y -> roles.judge_says=Y has no effect with roles.judge=null; leave it out, or set roles.judge
SUMS roles.judge=start roles.judge_prompt=Well? -> names neither {asked} nor {answer}
SUMS roles.judge=start -> it is the policy that the run starts from; set run.start_from, or name a folder
SUMS roles.judge=/nowhere -> roles.judge=/nowhere: config.json is missing, so it is not a folder of a model
SUMS roles.reward_model=/nowhere -> roles.reward_model=/nowhere: config.json is missing, so it is not a folder of a
SUMS roles.verifier=math:pi -> roles.verifier=math:pi is of type float, not a function
SUMS roles.verifier=my_rules:right -> there is no module my_rules; install it or start from the folder that holds it
SUMS env.rewards=[right] -> 'right' is neither correct nor my_pkg.my_module:my_reward
SUMS env.rewards=[my_a:short,my_b:short] -> short is there twice: metrics could not tell them apart
SUMS env.rewards=[my_rules:short] -> there is no module my_rules; install it or start from the folder that holds it
SUMS env.rewards=[correct] roles.verifier=a:b -> it replaces them; set roles.reward_weight
SUMS env.rewards=[correct] roles.reward_model=m -> it replaces them; set roles.reward_weight
SUMS env.rewards=[correct] roles.judge=/nowhere -> it replaces them; set roles.reward_weight
PPO env.name=benchmarks.gpu_points:GpuPoints env.rewards=[correct] -> a robot's reward is env.reward=my_pkg.my
SUMS roles.reward_weight=1 -> there is no other reward; leave it out, or set one
PPO policy.chunk=4 eval.delay=3 -> is too short for eval.delay=3 and policy.chunks.overlap=0: it takes twice the delay
PPO policy.chunk=4 policy.chunks.overlap=2 -> only evaluations join chunks: training scores the actions that the policy
PPO policy.chunks.blend=real_time -> policy.chunks.blend=real_time needs a flow policy, and this is mlp; try
pointmass_ppo_pi0_tiny policy.chunk=9 -> policy.chunk=9 is more than the 8 actions that the model predicts at once; try
pointmass_ppo_pi0_tiny policy.horizon=3 -> policy.chunk=4 is more than the 3 actions that the model predicts at once
pickcube_sft policy.chunk=4 policy.chunks.overlap=2 -> only evaluations join chunks
PPO policy.chunks.blend=cubic -> policy.chunks.blend='cubic': should be 'linear' or 'real_time'
SUMS eval.delay=3 -> eval.delay=3 counts env steps, and policy.name=language answers in words
PPO algo.average=20 eval.interleave=true -> evaluations beside a rollout play the weights that act in it
SUMS eval.interleave=true run.eval_every=null -> the only evaluation is the last; leave it out, or set run.eval_every=5
PPO learner.shard=true learner.graphs=on -> captures steps that one learner computes as a whole, but learner.shard
PPO learner.reduce_each_pass=true -> leave it out, or set learner.shard=true
SUMS sft.data=examples.jsonl -> sft.data has no effect in train; leave it out, or run python -m embodied.sft
PPO collect.noise=1 -> or run python -m embodied.collect
SFT algo.lr=1 -> has no effect in sft; leave it out
SFT eval.interleave=true -> eval.interleave has no effect in sft
SUMS learner.graphs=on -> conversations have any size; try learner.graphs=auto
GRPO PERIODIC ONCE learner.graphs=on -> groups of pipeline.schedule=periodic have any size; try learner.graphs=auto
PPO run.iterations=3 run.env_steps=100 -> run.env_steps=100 does not go with run.iterations=3; set one of them
PPO run.env_steps=null -> set one, for example run.iterations=100
GRPO run.iterations=null -> set one, for example run.iterations=100
SFT pipeline.schedule=async -> pipeline.schedule=async: nothing is collected in the meantime; leave it out
SFT pipeline.async_level=3 -> pipeline.async_level=3: nothing is collected in the meantime; leave it out
SFT pipeline.granularity=3 -> pipeline.granularity=3: nothing is collected in the meantime; leave it out
pickcube_sft learner.sequence_degree=2 -> has no effect with policy.name=mlp: only conversations pass
SFT learner.graphs=on -> imitation captures no steps; leave it out
SUMS learner.sequence_degree=2 algo.imitation.episodes=9 -> =2 does not go with algo.imitation={episodes: 9}: RL and
PPO algo.imitation.weight=0 -> algo.imitation.weight=0: should be greater than 0
PPO algo.imitation.decay=2 -> algo.imitation.decay=2: should be less than or equal to 1
SFT sft.final_lr=1e-4 sft.lr_schedule=linear -> with sft.lr_schedule=linear; leave it out, or set sft.lr_schedule=cosine
SFT sft.lr_schedule=cosine sft.lr=1e-4 sft.final_lr=1e-3 -> sft.final_lr=0.001 is above sft.lr=0.0001; swap them
PPO env.after_success=5 env.on_success=continue -> no effect with env.on_success=continue; try env.after_success=0
PPO env.privileged=true -> env.state=full: it hides nothing from the actor; try env.state=proprio
PPO env.reward=sucess -> did you mean 'success'
PPO env.reward=dense -> did you mean env.reward_mode=dense?
PPO env.reward_kwargs.scale=2 -> no effect with env.reward=own; leave it out, or name a class of yours
PPO policy.name=cnn policy.keypoints=true policy.features=9 -> policy.features=9 does not go with policy.keypoints=true
PPO policy.name=cnn policy.encoder=colors policy.keypoints=true -> =true does not go with policy.encoder=colors: it has
PPO policy.name=cnn policy.kernels=[4] -> describe the same layers; give each as many numbers
PPO faults.hang_s=900 -> faults.hang_s=900 is longer than faults.timeout_s=600
SUMS env.task=add3 -> is not a task of sums (known: add2, fewshot_sums, calc2, mul2); did you mean 'add2'?
SUMS env.name=reverse_text env.task=letters env.file=x -> it holds sentences; leave one of them out
SUMS env.python=x -> other text envs run in this interpreter; leave it out
SUMS policy.engine=http -> it asks a server; set policy.url=http://127.0.0.1:8000
SUMS policy.tensor_parallel=2 -> policy.tensor_parallel=2 has no effect with policy.engine=transformers; leave it out
SUMS policy.engine=vllm policy.tensor_parallel=3 -> does not divide the model's 4 attention heads and 4 key-value heads
SUMS policy.url=http://h policy.answer_s=5 -> policy.url=http://h and policy.answer_s=5 have no effect with policy.eng
SUMS policy.suspects=drop -> policy.suspects=drop has no effect with policy.engine=transformers; leave it out
SUMS policy.engine=http policy.url=127.0.0.1:8000 -> should be like http://
SUMS policy.engine=http policy.url=[http://h,http://h] -> should name every server once
SUMS policy.engine=http policy.url=http://me:secret@127.0.0.1 -> without a user's name
SUMS policy.engine=http policy.url=http://h policy.token_from=a-secret -> names an environment variable
SUMS algo.top_k=5 -> did you mean 'policy.top_k' or 'eval.top_k'
SUMS policy.temperature=0 -> policy.temperature=0: should be greater than 0
SUMS SERVER -> set a folder that it sees as well, such as policy.weights=/dev/shm
SUMS eval.top_p=0.9 eval.temperature=0 -> with eval.temperature=0 and policy.name=language: it takes the likeliest token
SUMS eval.top_k=1 eval.temperature=0 -> eval.top_k=1 does not go with eval.temperature=0
SUMS eval.overlay=true eval.mosaic=true -> eval.overlay=true and eval.mosaic=true do not go with policy.name=language
SUMS eval.sets={"a":{"file":"a.jsonl"}} eval.episodes=9 -> eval.episodes=9 has no effect with eval.sets: all of their
SUMS eval.sets={"a":{"file":"a.jsonl","temperature":0,"top_k":5}} -> top_k=5 does not go with temperature=0
SUMS policy.chat=false policy.system=Brief -> there is no template
PPO algo.final_lr=1e-5 -> algo.final_lr=1e-05 has no effect with algo.lr_schedule=constant; set algo.final_lr=0, or
PPO algo.lr_schedule=cosine algo.final_lr=1 -> try algo.final_lr=0
GRPO run.iterations=20 run.env_steps=null algo.warmup_iterations=20 -> try algo.warmup_iterations=2
PPO run.iterations=20 run.env_steps=null algo.critic_warmup=20 -> leaves the policy none of run.iterations=20
pointmass_ppo algo.critic_warmup=39 -> leaves the policy none of the 39 iterations of run.env_steps=20000; try
SUMS eval.samples=3 -> try eval.episodes=198
PPO eval.top_k=5 -> eval.top_k=5 has no effect with policy.name=mlp: actions are no tokens; leave it out
PPO eval.samples=2 -> eval.samples=2 has no effect with policy.name=mlp: only text envs are asked questions
PPO env.name=uneven_env:Uneven env.side_by_side=4 -> env.side_by_side=4: only text envs hold conversations
PPO env.name=sums -> answers with actions; try policy.name=language
PICTURES policy.preset=tiny -> policy.preset=tiny reads only text
PICTURES SERVER policy.weights=. policy.verify=0.1 -> proofs of answers to pictures are not checked; leave it out
SUMS policy.lora_rank=2 policy.lora_config.use_dorra=1 -> unknown key, did you mean 'use_dora'? known: use_dora, use_r
PPO env.name=pointmas -> did you mean 'pointmass'
PPO env.name=CartPole-v1 -> verifiers:<environment>, gym:<id>, envpool:<id>, metaworld:<task>, my_pkg.my_module:MyEnv
PPO env.num_envs=0 -> env.num_envs=0: should be greater than 0
PPO env.name=gym -> env.name=gym names no env: write env.name=gym:<id>; python -m embodied.list envs tasks says
SUMS env.name=sort algo.prompts=epochs -> env.name=sort has an unlimited number
SUMS env.name=talking_env:NothingToAsk algo.prompts=epochs -> num_questions says that no questions
SUMS env.reward=difference -> there are own, success
SUMS env.name=mixture env.mixture={} -> env.mixture is empty
SUMS env.name=mixture env.mixture={"a":{"task":"add2"}} -> takes the options of a text env, its name among
SUMS env.name=mixture env.mixture={"a":{"name":"sums","weight":0}} -> should be a number above 0
SUMS env.name=mixture env.mixture={"a":{"name":"pointmass"}} -> env.name=pointmass is no text env
SUMS env.name=mixture env.mixture={"a":{"name":"sums","tusk":1}} -> env.mixture.a.tusk
libero_ppo env.task=libero_spacial -> did you mean 'libero_spatial'
libero_ppo env.task=libero_goal_swop/1 -> did you mean 'libero_goal_swap'
libero_ppo env.task=libero_spatial/10 -> has the tasks libero_spatial/0 to libero_spatial/9
libero_ppo env.task=libero_spatial/x -> has the tasks
libero_ppo env.task=[] -> should be the name of a task, or a list of names
libero_ppo env.task=[libero_goal,libero_goal/2] -> names libero_goal/2 twice
maniskill_ppo env.task=[PushCube-v1,PickCube-v1] -> trains one task at a time
SFT sft.adam_betas=[0.9,1.0] -> less than 1
SFT sft.weight_decay=-1 -> greater than or equal to 0
PPO cluster.machines=2x8xGPU cluster.backend=local -> try cluster.backend=auto
PPO cluster.machines=2x8xGPU cluster.backend=inline -> try cluster.backend=auto
PPO cluster.machines=1xGPU learner.device=cpu placement={"sim":"gpu:0","policy,learner":"cpu:0"} -> to draw on the
PPO cluster.machines=1xGPU learner.device=cpu placement={"sim,policy":"cpu:0","learner":"gpu:0"} -> try learner.device=
PPO cluster.machines=1xGPU placement={"sim":"cpu:0","policy":"gpu:0","learner":"gpu:0*2"} -> 2 learners on gpu:0, but
maniskill_ppo cluster.machines=1xGPU learner.device=cuda COREMAP -> sim and policy on cpu:0, but learner.device=cuda
maniskill_ppo cluster.machines=1xGPU env.backend=cuda COREMAP -> sim on cpu:0, but env.backend=cuda simulates on a GPU
PPO ASYNC cluster.machines=1xCPU -> try pipeline.schedule=sync
PPO ASYNC cluster.machines=1xCPU placement=disaggregated -> try pipeline.schedule=sync
PPO ASYNC cluster.machines=1xCPU placement={"sim,policy":"cpu:0","learner":"cpu:0"} -> try pipeline.schedule=sync
PPO ASYNC cluster.machines=2xCPU placement=collocated -> try placement=auto
PPO ASYNC cluster.machines=2xCPU placement=hybrid -> try placement=auto
PPO ASYNC cluster.machines=2xCPU placement=disaggregated -> try placement=auto
PPO ASYNC cluster.machines=2xCPU placement={"sim":"cpu:0","policy,learner":"cpu:1"} -> try placement=auto
PPO ASYNC cluster.machines=2xCPU placement={"sim,policy":"cpu:0","learner":"cpu:0-1"} -> try placement=auto
FEW cluster.machines=2xCPU learner.sequence_degree=4 -> the 2 learners of this placement; try learner.sequence_degree=2
FEW cluster.machines=3xGPU learner.sequence_degree=4 -> the 3 learners of this placement; try learner.sequence_degree=1
FEW cluster.machines=2xCPU cluster.backend=inline learner.sequence_degree=2 -> try cluster.backend=local
FEW cluster.machines=2xCPU learner.compile=true learner.sequence_degree=auto -> try learner.compile=false
PPO learner.shard=true placement={"sim,policy":"cpu:0","learner":"cpu:1"} -> try learner.shard=false, or placement=
"""
ROWS = [row.split(" -> ") for row in TABLE.strip().splitlines()]


def words_of(asked):
    name, *words = " ".join(SHORT.get(word, word) for word in asked.split()).replace("LONG", "a" * 300).split()
    return [f"recipe={name}", *words]


@cache
def answered(words):
    """The lines that these words are answered with, and the rules that they break."""
    broken, fired = Rule.broken, set()

    def noted(rule, config, section):
        if text := broken(rule, config, section):
            fired.add(id(rule))
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rule, "broken", noted)
        return refused(words), fired


def mistakes(words):
    return answered(tuple(words))[0]


def refused(words):
    """The lines that these words are answered with, and none where they are a configuration."""
    sft = words[0].endswith("_sft")
    try:
        launch.planned(load([*words], "sft" if sft else "train").config, dry=True)
    except EmbodiedError as err:
        return [re.sub(r" \([^()]*from [^()]*\)$", "", line).strip() for line in str(err).splitlines()]
    return []


@pytest.mark.parametrize(("asked", "answer"), ROWS, ids=[asked for asked, _ in ROWS])
def test_conflicting_options_are_refused_with_a_value_that_works(asked, answer):
    words = words_of(asked)
    told = mistakes(words)
    (line,) = (line for line in told if answer in line)
    assert not re.match(r"\w+=\{", line), "it shows a whole section"
    for advised in re.findall(r"(?:try|set|such as) ((?:[a-z]+\.\w+=[\w./:*-]+ ?)+)", line):
        keys = {word.partition("=")[0] for word in advised.split()}
        again = mistakes([*(word for word in words if word.partition("=")[0] not in keys), *advised.split()])
        assert line not in again, f"{advised} is no way out"


def test_one_wrong_option_is_one_mistake():
    assert len(mistakes(words_of("PPO algo.groups=4"))) == 1


@pytest.mark.parametrize("asked", ["SUMS", "pointmass_ppo_pi0_tiny"])
def test_a_dry_run_refuses_a_folder_without_a_model_or_its_weights(asked, tmp_path):
    words = [*words_of(asked), f"policy.pretrained={tmp_path}"]
    assert any(f"policy.pretrained={tmp_path}: config.json is missing" in line for line in refused(words))
    (tmp_path / "config.json").write_text("{}")
    assert any(f"policy.pretrained={tmp_path}: the model has no weights there" in line for line in refused(words))


def rules():
    """Every rule: those of the options' models, and those of a whole configuration."""
    kinds, found = [Strict], []
    while kinds:
        kind = kinds.pop()
        kinds += [one for one in kind.__subclasses__() if one.__module__.startswith("embodied.")]  # not of other tests
        found += [*vars(kind).get("rules", ()), *vars(kind).get("not_periodic", ())]
    whole = [value for module in (recipe, memory_check) for value in vars(module).values() if isinstance(value, tuple)]
    return [*found, *(rule for rules in whole for rule in rules if isinstance(rule, Rule))]


def test_every_rule_has_a_row():
    fired = {rule for asked, _ in ROWS for rule in answered(tuple(words_of(asked)))[1]}
    unseen = [rule for rule in rules() if id(rule) not in fired]
    assert not unseen


# The words of other toolkits are answered with our keys, and misspelt keys with the nearest by their last part


KEYS = {key for key, _, _ in leaves(root(RunConfig))}


def answer(*arguments, entry="train"):
    with pytest.raises(ConfigError) as told:
        load(list(arguments), entry)
    return str(told.value)


def test_the_table_names_keys_there_are_and_no_word_is_a_whole_key():
    assert {key for keys in OURS for key in keys.split()} <= {*KEYS, "recipe"}
    assert not USUAL.keys() & KEYS
    words = " ".join(OURS.values()).split()
    assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("learning_rate", "'algo.lr'"),
        ("algo.learning_rat", "'algo.lr'"),
        ("n_envs", "'env.num_envs'"),
        ("num_envs", "'env.num_envs'"),
        ("eval.num_env", "'eval.num_envs'"),
        ("gamma", "'algo.gamma'"),
        ("batch_size", "'algo.minibatch_size'"),
        ("total_timesteps", "'run.env_steps'"),
        ("env_id", "'env.task'"),
        ("SEED", "'seed'"),
        ("random_seed", "'seed'"),
        ("clip_range", "'algo.clip_low' or 'algo.clip_high'"),
        ("policy.hiden", "'policy.hidden'"),
        ("recipee", "'recipe'"),
    ],
)
def test_a_key_of_another_toolkit_or_misspelt_is_answered_with_ours(key, ours):
    assert answer("recipe=pointmass_ppo", f"{key}=3") == f"{key}: unknown key, did you mean {ours}? (from command line)"


def test_only_keys_that_have_an_effect_are_named():
    assert "'sft.lr'?" in answer("recipe=sums_sft", "learning_rate=3", entry="sft")
    assert "did you mean" not in answer("recipe=pointmass_ppo", "max_new_tokens=3")
    assert "'policy.max_tokens'?" in answer("recipe=sums_grpo", "max_new_tokens=3")
    assert "'checkpoint'?" in answer("chekpoint=random", "env.name=pointmass", entry="evaluate")
