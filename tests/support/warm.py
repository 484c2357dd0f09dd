"""Imported once by the process that commands are forked from: what each of them would import, and build, again."""

import gc
import os

import jsonschema  # noqa: F401
from pydantic import BaseModel  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import hone.agents.tools.loading  # noqa: F401
import hone.apps.explain.catalogue  # noqa: F401
import hone.cli.data  # noqa: F401
import hone.cli.models  # noqa: F401
import hone.cli.programs  # noqa: F401
import hone.cluster.local  # noqa: F401
import hone.data.checks  # noqa: F401
import hone.generation.native.engine  # noqa: F401
import hone.preflight.plan.devices  # noqa: F401
import hone.rewards.bench  # noqa: F401
import hone.trainers.evaluation  # noqa: F401
import hone.trainers.preference  # noqa: F401
import hone.trainers.rl  # noqa: F401
import hone.trainers.sft  # noqa: F401
from hone.config import RLConfig, load_config

os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]  # see support.launch.context
load_config(RLConfig, [], preset="grpo")
get_checkpoint_conversion_mapping("qwen3")
gc.freeze()  # a fork's garbage collection would copy every page of this
