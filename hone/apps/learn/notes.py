"""Check boxes of the learning notes and weeks of the 30-day path, and the boxes of the course that cover them."""

from __future__ import annotations

CHECK_BOXES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "first_run": (
        ("完成环境安装", "environment installed", "install"),
        ("下载模型和数据", "model and data present", "data_and_model"),
        ("完成第一次训练", "first training done", "first_training"),
        ("学会使用 TensorBoard", "curves read", "curves"),
        ("评估训练效果", "effect of training evaluated", "evaluate baseline"),
    ),
    "data": (
        ("理解 Parquet 格式", "parquet understood", "parquet"),
        ("准备单轮数据", "single-turn data prepared", "single_turn"),
        ("准备多轮数据", "multi-turn data prepared", "multi_turn"),
        ("实现数据检查", "data check implemented", "data_check"),
    ),
    "algorithms": (
        ("理解 GRPO 算法原理和实现", "GRPO: principle and implementation", "groups advantages"),
        ("理解 PPO 算法和 GAE", "PPO and GAE", "ppo clip"),
        ("对比不同算法的优缺点", "algorithms compared", "two_estimators preferences"),
        (
            "实现算法切换和参数调优",
            "algorithms switched, parameters tuned",
            "switch sweep_micro_batch sweep_kl sweep_rollout",
        ),
    ),
    "reward": (
        ("理解 Reward 函数基础和签名", "reward function and its signature", "signature"),
        ("掌握 RewardManager 调用流程", "way of a reward through the trainer", "flow"),
        ("实现 Rule-based Reward", "rule-based rewards", "five_rewards write_reward repair_reward"),
        ("了解 Model-based 和 Sandbox Reward", "model-based and sandbox rewards", "reward_model sandbox"),
        ("掌握 Reward Shaping 技巧", "reward shaping", "shaping"),
    ),
    "agents": (
        ("理解 Agent Loop", "agent loop", "agent_loop"),
        ("准备工具调用数据", "data with tool calls", "tool_data"),
        ("训练第一个 Agent", "first agent trained", "first_agent game"),
        ("实现自定义 Agent Loop", "a loop of one's own", "own_loop"),
    ),
}
"""Part to its check boxes: words of the notes, what they mean, and the boxes of the course."""
WEEKS = (
    ("1", "a baseline, frozen end to end", "first_training evaluate baseline"),
    (
        "2",
        "three sweeps: micro-batch, KL coefficient, budget of the rollout",
        "sweep_micro_batch sweep_kl sweep_rollout",
    ),
    ("3", "two estimators on the same ground", "ppo two_estimators"),
    ("4", "a tool task of two or three turns", "tool_data first_agent game"),
)
"""Weeks of the 30-day path: number, aim, and boxes."""
