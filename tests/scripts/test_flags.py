"""The command line is NVIDIA's: every flag of its documentation, with its default."""

import re

import forked
import pytest

from dlrm.flags import HelpAsked
from dlrm.language import flags as bert_flags
from dlrm.language.bert import BertConfig
from dlrm.model.config import ARCHITECTURE, DLRMConfig
from dlrm.scripts.common import dlrm_flags
from dlrm.settings import settings_of
from dlrm.tasks.config import CLICK_CONFIGS, RESUMABLE
from dlrm.train.schedule import LR_SCHEDULES
from dlrm.vision import flags as cnn_flags

pytestmark = pytest.mark.long
# All 43 flags that the README of June 2020 prints for main.py, with the defaults printed there.
# base_device: ours is cuda if there is one, else cpu.
JUNE_2020 = {
    "amp": False,
    "auc_threshold": None,
    "base_device": None,
    "batch_size": 32768,
    "benchmark_warmup_steps": 0,
    "bottom_mlp_sizes": ["512", "256", "128"],
    "dataset": None,
    "dataset_subset": None,
    "dataset_type": "split",
    "decay_end_lr": 0.0,
    "decay_power": 2,
    "decay_start_step": 64000,
    "decay_steps": 80000,
    "embedding_dim": 128,
    "embedding_type": "joint_fused",
    "epochs": 1,
    "hash_indices": False,
    "inference_benchmark_batch_sizes": ["1", "64", "4096"],
    "inference_benchmark_steps": 200,
    "interaction_op": "cuda_dot",
    "load_checkpoint_path": None,
    "log_path": "./log.json",
    "loss_scale": 1024.0,
    "lr": 28.0,
    "max_steps": None,
    "max_table_size": None,
    "mode": "train",
    "num_numerical_features": 13,
    "optimized_mlp": True,
    "output_dir": "/tmp",
    "print_freq": 200,
    "save_checkpoint_path": None,
    "seed": 12345,
    "shuffle_batch_order": False,
    "synthetic_dataset_dir": "/tmp/dlrm_sythetic_dataset",
    "synthetic_dataset_num_entries": 33554432,
    "synthetic_dataset_table_sizes": ["100000"] * 26,
    "test_after": 0.0,
    "test_batch_size": 32768,
    "test_freq": None,
    "top_mlp_sizes": ["1024", "1024", "512", "256", "1"],
    "warmup_factor": 0,
    "warmup_steps": 6400,
}

# Flags that NVIDIA added until 2023.
LATER = {
    "auc_device": "GPU",
    "backend": "nccl",
    "bottom_features_ordered": False,
    "cuda_graphs": False,
    "feature_spec": "feature_spec.yaml",
    "freeze_embeddings": False,
    "freeze_mlps": False,
    "synthetic_dataset_numerical_features": None,
    "synthetic_dataset_use_feature_spec": False,
}

CHOICES = {
    "mode": {"train", "test", "inference_benchmark"},
    "dataset_type": {
        *("binary", "memmap", "split", "parametric"),
        *("synthetic_gpu", "synthetic_random", "synthetic_disk"),
    },
    "recipe": {"auto"},
    "log_format": {"nvidia", "short"},
    "embedding_type": {"joint", "joint_fused", "joint_sparse", "multi_table", "custom_cuda"},
    "cross_structure": {"stacked", "parallel"},
    "embedding_init": {"uniform", "normal"},
}


DEFAULTS = dlrm_flags.parse([])


def test_every_flag_of_nvidia_has_its_documented_default():
    found = {n: list(map(str, v)) if isinstance(v, tuple) else v for n, v in DEFAULTS.items()}
    documented = JUNE_2020 | LATER
    assert {name: found.get(name, "no flag") for name in documented} == documented
    assert not DEFAULTS.given


@pytest.mark.parametrize(("flag", "choices"), CHOICES.items())
def test_every_documented_choice_is_taken(flag, choices):
    for choice in choices:
        assert dlrm_flags.parse([f"--{flag}={choice}"])[flag] == choice
    with pytest.raises(ValueError, match=f"flag --{flag}=x: value should be one of <") as raised:
        dlrm_flags.parse([f"--{flag}=x"])
    (listed,) = re.findall("<(.*)>", str(raised.value))
    assert set(listed.split("|")) == choices


def test_interactions_are_named_alone_or_with_commas_between():
    for names in ("cuda_dot", "dot", "cat", "dcn", "dot,dcn", "cat,dcn,cuda_dot"):
        assert dlrm_flags.parse([f"--interaction_op={names}"])["interaction_op"] == names
    wrong = {
        "x": "--interaction_op x: expected cuda_dot, dot, cat, dcn.*, or several of .* got 'x'",
        "dot,": "--interaction_op dot,: expected .* got ''",
        "dcn,dcn": "dcn is named twice",
        "dot,cuda_dot": "dot and cuda_dot are the same products",
    }
    for names, problem in wrong.items():
        with pytest.raises(ValueError, match=problem):
            dlrm_flags.parse([f"--interaction_op={names}"])


def test_ensembles_are_numbers_or_interactions():
    for text, value in {"8": 8, "dot*3,quadratic*3": "dot*3,quadratic*3"}.items():
        assert dlrm_flags.parse([f"--ensemble={text}"])["ensemble"] == value
    for text, problem in {
        "0": "--ensemble 0: expected 1 or more",
        "dot*x": "--ensemble .*: expected a number of members, or .*, got 'dot.x'",
        "dot*2,sum*2": r"--ensemble dot\*2,sum\*2: expected cuda_dot, dot.* got 'sum'",
    }.items():
        with pytest.raises(ValueError, match=problem):
            dlrm_flags.parse([f"--ensemble={text}"])


def test_dist_main_has_nvidias_defaults_for_several_gpus():
    assert dlrm_flags.DIST_MAIN == {
        "batch_size": 65536,
        "test_batch_size": 131072,
        "lr": 24.0,
        "warmup_steps": 8000,
        "decay_steps": 24000,
        "decay_start_step": 48000,
        "embedding_type": "joint_sparse",
    }
    assert dlrm_flags.DIST_MAIN.keys() <= JUNE_2020.keys()
    shown = dlrm_flags.make_flags(dlrm_flags.DIST_MAIN).help()
    assert re.search(r"--batch_size: .*\n\s+\(default: '65536'", shown)
    assert "--placement" in shown


def test_shuffle_is_the_short_name():
    values = dlrm_flags.parse(["-shuffle"])
    assert values["shuffle_batch_order"]
    assert values.given == {"shuffle_batch_order"}


def test_flags_are_written_as_absl_has_them(tmp_path):
    file = tmp_path / "more.flags"
    file.write_text("# a file of flags\n--lr=2\n--top_mlp_sizes=8,1\n")
    values = dlrm_flags.parse(
        [
            *("--epochs", "3", "--epochs=4", "--notf32", "--amp=true", f"--flagfile={file}"),
            *("--decay_start_step=None", "--undefok=of_another", "--of_another=1", "--seed=-0"),
        ]
    )
    changed = {"epochs": 4, "tf32": False, "amp": True, "lr": 2.0, "top_mlp_sizes": (8, 1)}
    changed |= {"decay_start_step": None, "seed": 0}
    assert values == {**DEFAULTS, **changed}
    assert values.given == changed.keys()


def test_what_absl_finds_is_told_in_its_words():
    for word, message in {
        "--batchsize=1": "Unknown command line flag 'batchsize'. Did you mean: batch_size, ",
        "--learning-rate=1": "Unknown command line flag 'learning-rate'. Did you mean: lr ?",
        "--lr=x": "flag --lr=x: could not convert string to float: 'x'",
        "--seed=-1": "flag --seed=-1: -1 is not an integer in the range",
        "train": "expected flags only, got ['train']",
    }.items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            dlrm_flags.parse([word])


@pytest.mark.parametrize("flag", ["-?", "--helpshort", "--helpfull"])
def test_the_help_is_shown_whatever_else_is_given(flag):
    with pytest.raises(HelpAsked) as asked:
        dlrm_flags.parse(["--nonsense", flag, "--lr=x"])
    assert asked.value.full == (flag == "--helpfull")


def test_help_lists_every_flag():
    done = forked.succeed("dlrm.scripts.main", "--helpfull")
    listed = re.findall(r"^  (?:-\w+,)?--(?:\[no\])?(\w+):", done.stdout, re.MULTILINE)
    assert set(listed) == DEFAULTS.keys() | {"config", "version", "flagfile", "undefok"}
    assert "Trains, tests or times a DLRM" in done.stdout


@pytest.mark.parametrize(
    ("line", "under"),
    [
        (dlrm_flags.make_flags(), {"Precision": "amp", "Synthetic data": "synthetic_ids"}),
        (cnn_flags.FLAGS, {"Network": "norm", "Training": "epochs"}),
        (bert_flags.FLAGS, {"Text": "vocab_file", "Optimizer": "lamb_flavor"}),
    ],
)
def test_help_shows_each_flag_once_under_its_topic(line, under):
    shown = line.help()
    topics = re.split(r"^(\w[\w ]+):\n", shown, flags=re.MULTILINE)[1:]
    flag = re.compile(r"^  (?:-\w+,)?--(?:\[no\])?(\w+):", re.MULTILINE)
    listed = {t: flag.findall(s) for t, s in zip(topics[::2], topics[1::2], strict=True)}
    for topic, name in under.items():
        assert name in listed[topic]
    everything = [name for names in listed.values() for name in names]
    assert len(everything) == len(set(everything)) > 60
    assert everything == flag.findall(shown)


@pytest.mark.parametrize("command", [cnn_flags, bert_flags])
def test_each_text_of_the_networks_stands_alone(command):
    """No text begins with "Of" or depends on its neighbor."""
    shown = " ".join(command.FLAGS.help().split())
    texts = dict(re.findall(r" --(?:\[no\])?(\w+): (.*?)(?= --(?:\[no\])?\w+: |$)", shown))
    assert len(texts) > 80
    leaning = r"(<[^>]*>: )?(Of|Instead of|The same of) |.*as above"
    assert [name for name, text in texts.items() if re.match(leaning, text)] == []
    assert "help" not in texts
    assert texts["mode"].startswith(f"<{'|'.join(command.MODES)}>: ")
    assert texts["lr_schedule"].startswith(f"<{'|'.join(LR_SCHEDULES)}>: ")


def test_the_help_of_bert_says_each_default_once():
    shown = " ".join(bert_flags.help_text().split())
    told = dict(re.findall(r" --(\w+): ([^(]*?\(default: [^)]*\))", shown))
    assert told["lr"].endswith("(default: that of --recipe)")
    assert told["vocab_size"].endswith(
        f"(default: that of --recipe graphcore, else of the data, else {BertConfig().vocab_size})"
    )
    twice = [name for name, text in told.items() if text.count("default") > 1 and " --" not in text]
    assert twice == []
    assert re.search(r"--mode: <[^>]*>: Task to perform; required --", shown)


# Settings of the model that change no network: a checkpoint does not determine them.
NO_ARCHITECTURE = {
    *("dropout", "embedding_init", "embedding_init_scale", "embedding_init_std", "embedding_type"),
    *("output_init", "placement", "self_ensemble"),
}
# What a resumed run must keep besides the architecture.
FROZEN = {
    *("amp", "amp_dtype", "base_device", "batch_size", "dataset_subset", "dataset_type"),
    *("continue_lr", "distill_weight"),
    *("decay_end_lr", "decay_power", "decay_start_step", "decay_steps", "ema_decay"),
    *("embedding_l2", "embedding_l2_mode", "embedding_optimizer", "feature_spec"),
    *("freeze_embeddings", "freeze_mlps", "gradient_accumulation_steps"),
    *("loss_scale", "lr", "max_grad_norm", "mlp_optimizer", "mlp_products"),
    *("num_numerical_features", "plateau_factor", "plateau_patience"),
    *("sample_weights", "schedule", "seed", "set_aside", "shuffle_batch_order"),
    *("synthetic_dataset", "synthetic_dataset_hotness", "synthetic_dataset_max_table_size"),
    *("synthetic_dataset_num_entries", "synthetic_dataset_numerical_features"),
    *("synthetic_dataset_table_sizes", "synthetic_dataset_use_feature_spec", "synthetic_ids"),
    *("tf32", "warmup", "warmup_factor", "warmup_steps", "warmup_unit", "weight_decay"),
}


def test_every_setting_is_architecture_or_frozen_or_may_change():
    """A new setting is entered here, so that its role in checkpoints is not forgotten."""
    assert {*settings_of(DLRMConfig)} - {*ARCHITECTURE} == NO_ARCHITECTURE
    own = {*settings_of(*(config for _, config in CLICK_CONFIGS))}
    assert (
        own - RESUMABLE
        == {*ARCHITECTURE} | NO_ARCHITECTURE - {"embedding_type", "placement"} | FROZEN
    )
