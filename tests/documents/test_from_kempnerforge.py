"""Every key of the other project stands on its page once, and leads to a key that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forge_core.optim import OPTIMIZERS, SCHEDULES
from forge_train.report.describe import key_rows

pytestmark = pytest.mark.lane("test")

PAGE = (Path(__file__).parents[2] / "docs/from-kempnerforge.md").read_text()
KEYS, _, _ = PAGE.partition("\n## Functions, ")  # the rest: test_from_kempnerforge_code.py
# Its tables of June 2026, by section.
THERE = {
    "model": "dim n_layers n_heads n_kv_heads vocab_size ffn_dim_multiplier ffn_hidden_dim norm_type norm_eps"
    " activation max_seq_len rope_theta tie_embeddings qk_norm init_std model_type sdpa_backend",
    "model, mixtures of experts": "num_experts moe_top_k moe_frequency moe_router moe_shared_experts"  # prose: a heading of the page
    " moe_aux_loss_weight moe_capacity_factor moe_sequence_aux_loss_weight moe_gradient_scale"
    " moe_packed_experts moe_bias_schedule moe_expert_ffn_multiplier moe_router_z_loss_weight",
    "train": "batch_size seq_len max_steps grad_accum_steps grad_clip_norm seed data_seed compile_model"
    " mixed_precision activation_checkpointing loss_fn z_loss_weight ce_chunk_size shutdown_timeout_sec"
    " nccl_health_check_interval",
    "optimizer": "name lr weight_decay betas eps fused muon_momentum muon_ns_steps muon_adam_lr"
    " schedule_free_warmup_steps",
    "scheduler": "name warmup_steps decay_steps min_lr_ratio stable_steps wsd_decay_type rex_alpha",
    "data": "dataset_path file_pattern tokenizer_path num_workers pin_memory prefetch_factor hf_dataset_name"
    " hf_dataset_config hf_dataset_split hf_dataset_text_field hf_streaming pack_sequences datasets[].path"
    " datasets[].weight datasets[].name datasets[].hf_name datasets[].hf_config mix_temperature"
    " phases[].start_step phases[].dataset_weights phases[].lr_scale anneal_start_step anneal_weights",
    "profiling": "enable start_step end_step trace_dir",
    "eval": "enabled interval steps dataset_path file_pattern hf_dataset_name hf_dataset_config hf_dataset_split"
    " hf_dataset_text_field",
    "metrics": "log_interval enable_wandb enable_tensorboard wandb_project wandb_run_name wandb_run_id"
    " tensorboard_dir enable_mlflow mlflow_experiment mlflow_run_id",
}


def rows(page: str = KEYS) -> dict[str, list[tuple[str, str, str]]]:
    """{section: (key there, key here or "gone", remark)}."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for part in page.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        cells = re.findall(r"^\| `([^`]+)` \| (`[^`]+`|gone) \| ?(.*?) ?\|$", body, re.MULTILINE)
        found[title] = [(there, here.strip("`"), remark) for there, here, remark in cells]
    return found


def test_every_key_is_mapped_once_and_a_missing_one_has_a_reason() -> None:
    found = rows()
    assert {title: [row[0] for row in part] for title, part in found.items()} == {
        title: keys.split() for title, keys in THERE.items()
    }
    for part in found.values():
        assert all(remark for _, here, remark in part if here == "gone")


def test_keys_and_names_on_the_right_exist() -> None:
    keys = {row.key for row in key_rows()}
    for part in rows().values():
        for _, here, remark in part:
            dotted = {name for name in re.findall(r"`([a-z_.<>]+)`", remark) if "." in name}
            assert {*dotted, *([] if here == "gone" else [here])} <= keys
    names = {title: part[0][2] for title, part in rows().items()}
    assert set(re.findall(r"`(\w+)`", names["optimizer"])) <= OPTIMIZERS.built_in.keys()
    assert set(re.findall(r"`(\w+)`", names["scheduler"])) <= SCHEDULES.built_in.keys()


@pytest.mark.parametrize("name", ["from-torchtitan", "from-hf-trainer"])
def test_keys_of_other_pages_exist(name: str) -> None:
    found = rows((Path(__file__).parents[2] / f"docs/{name}.md").read_text(encoding="utf-8"))
    mapped = [(here, remark) for part in found.values() for _, here, remark in part]
    assert len(mapped) > 20
    assert {here for here, _ in mapped} - {"gone"} <= {row.key for row in key_rows()}
    assert all(remark for here, remark in mapped if here == "gone")
