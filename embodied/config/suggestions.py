"""Finds the intended key or word. It also knows the names of our keys in Stable-Baselines3, CleanRL, rsl_rl,
ManiSkill's scripts, RLinf and TRL.

For a mistyped key the nearest key by its last part is suggested; other toolkits' names count: `learning_rat` is
algo.lr.
"""

from __future__ import annotations

import difflib

OURS = {  # our keys -> names in other toolkits; a name may mean two keys
    "recipe": "config config_name config_path config_file cfg yaml",
    "seed": "random_seed rng_seed manual_seed random_state seeds",
    "resume": "resume_from resume_path resume_from_checkpoint load_run",
    "placement": "num_workers n_workers num_processes n_jobs component_placement",
    "run.env_steps": "total_timesteps timesteps num_timesteps max_timesteps total_steps steps total_env_steps "
    "num_env_steps",
    "run.iterations": "max_iterations num_iterations n_iterations num_updates max_epochs max_steps training_steps",
    "run.eval_every": "eval_freq eval_interval eval_frequency val_check_interval test_freq eval_steps",
    "run.save_every": "save_freq save_interval save_steps checkpoint_interval checkpoint_freq",
    "run.keep": "save_total_limit max_checkpoints",
    "run.dir": "log_dir logdir save_dir output_dir log_path experiment_dir tensorboard_log",
    "run.name": "exp_name experiment_name run_name",
    "run.log": "track wandb use_wandb report_to log_with logger logger_backends",
    "run.start_from": "checkpoint load_path init_from",
    "env.name": "simulator env_type simulator_type",
    "env.task": "env_id env_name task_name task_id environment",
    "env.num_envs": "num_envs n_envs nenvs num_environments total_num_envs env_num",
    "env.max_episode_steps": "max_episode_length episode_length max_episode_len time_limit",
    "env.backend": "sim_backend physics_backend",
    "env.control_mode": "controller controller_type",
    "env.robot": "robot_uids robots",
    "env.reward_mode": "reward_type",
    "env.on_success": "partial_reset ignore_terminations auto_reset",
    "env.state env.cameras": "obs_mode observation_mode",
    "policy.name": "model policy_type model_type network",
    "policy.pretrained": "model_path model_name model_name_or_path pretrained_path",
    "policy.hidden": "hidden_sizes hidden_dims hidden_dim hidden_size actor_hidden_dims net_arch",
    "policy.activation": "activation_fn",
    "policy.initial_log_std": "log_std_init init_noise_std action_std_init",
    "policy.normalize_observations": "normalize_obs norm_obs obs_normalization empirical_normalization",
    "policy.max_tokens": "max_new_tokens max_completion_length max_response_length response_length",
    "policy.max_length": "max_prompt_length max_seq_len max_model_len",
    "policy.lora_rank": "lora_r",
    "policy.lora_scale": "lora_alpha",
    "algo.name": "algorithm adv_type",
    "algo.lr": "lr learning_rate actor_lr policy_lr",
    "algo.value_lr": "critic_lr vf_lr critic_learning_rate",
    "algo.lr_schedule": "anneal_lr lr_scheduler lr_scheduler_type",
    "algo.gamma": "gamma discount discount_factor",
    "algo.gae_lambda": "lam lambda lmbda gae_lam",
    "algo.rollout_decisions": "n_steps num_steps nsteps num_steps_per_env rollout_steps rollout_length horizon_length",
    "algo.minibatch_size": "batch_size mini_batch_size num_minibatches num_mini_batches global_batch_size",
    "algo.epochs": "n_epochs num_epochs update_epochs ppo_epochs num_learning_epochs update_epoch",
    "algo.clip_low algo.clip_high": "clip_range clip_coef clip_param clip_ratio cliprange epsilon eps_clip",
    "algo.value_clip": "clip_range_vf clip_vloss cliprange_value use_clipped_value_loss",
    "algo.entropy_coef": "ent_coef entropy_coeff entropy_bonus",
    "algo.value_coef": "vf_coef value_loss_coef vf_coeff critic_coef",
    "algo.normalize_advantages": "norm_adv normalize_advantage",
    "algo.target_kl": "desired_kl kl_target",
    "algo.kl_coef": "beta kl_beta kl_coeff init_kl_coef kl_loss_coef",
    "algo.max_grad_norm": "grad_clip gradient_clip clip_grad max_norm",
    "algo.group_size": "num_generations rollout_n num_return_sequences",
    "algo.adam_eps": "adam_epsilon optimizer_eps",
    "learner.device": "device cuda use_cuda",
    "learner.micro_batch_size": "micro_batch per_device_train_batch_size gradient_accumulation_steps",
    "learner.precision": "bf16 fp16 torch_dtype mixed_precision",
    "learner.checkpoint_activations": "gradient_checkpointing activation_checkpointing",
    "eval.episodes": "n_eval_episodes num_eval_episodes eval_episodes num_eval_steps",
    "eval.num_envs": "num_eval_envs n_eval_envs",
    "eval.videos": "capture_video record_video save_video num_videos",
}
USUAL = {word: keys.split() for keys, words in OURS.items() for word in words.split()}
TRUNCATES = ("top_p", "top_k")
CLOSE = 0.8  # limit of difflib's ratio, for the last part of a key; 0.6 for a whole key
FAR = 0.6


def meant(key: str, known: list[str]) -> list[str]:
    """The keys among `known` that a misspelt or foreign name most likely means; the likeliest first."""
    section, _, last = key.rpartition(".")
    word = as_word(last)
    if as_word(key) in known:
        return [as_word(key)]
    ours: dict[str, list[str]] = {}
    for one in known:
        ours.setdefault(one.rpartition(".")[2], []).append(one)
    if word in USUAL:
        return in_section(section, USUAL[word], known)
    if word in ours:
        return in_section(section, ours[word], known)
    theirs = {
        name: matching
        for name, keys in USUAL.items()
        if name not in known and (matching := in_section(section, keys, known))
    }
    beside = [one for one in known if section and one.startswith(f"{section}.")]
    for names in ({one.rpartition(".")[2]: [one] for one in beside}, ours | theirs):
        if near := difflib.get_close_matches(word, list(names), 1, CLOSE):
            return names[near[0]]
    return difflib.get_close_matches(key, known, 1, FAR)


def in_section(section: str, keys: list[str], known: list[str]) -> list[str]:
    """The known keys among these: in that section if it has them, else as they are, else in another section."""
    ends = [key.rpartition(".")[2] for key in keys]
    of_section = [path for end in ends if (path := f"{section}.{end}") in known] if section else []
    return (
        of_section or [key for key in keys if key in known] or [key for key in known if key.rpartition(".")[2] in ends]
    )


def as_word(word: str) -> str:
    return word.strip("-+~").replace("-", "_").lower()


def hint(key: str, known: list[str]) -> str:
    """`, did you mean 'algo.lr'?`, or nothing; for top_p and top_k of rollouts, the reason why they do not exist."""
    section, _, last = key.rpartition(".")
    if section != "eval" and as_word(last) in TRUNCATES and f"eval.{as_word(last)}" in known:
        return (
            ": rollouts draw from all tokens, since losses need log-probs of the distribution that tokens are drawn "
            f"from; policy.temperature sharpens it, and eval.{as_word(last)} truncates it in evaluations"
        )
    likely = meant(key, known)
    return f", did you mean {' or '.join(map(repr, likely))}?" if likely else ""


def usual(word: str) -> str:
    """Our key for another toolkit's word, for any recipe; else the word."""
    return USUAL.get(as_word(word), [word])[0]
