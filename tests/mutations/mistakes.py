"""Twenty small mistakes, each in one place, and the tests that see them."""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """`right` occurs once in `file`; with `wrong` in its place one of `tests` must fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


_CORE = "packages/forge-core/src/forge_core"
_DATA = "packages/forge-data/src/forge_data"
_CKPT = "packages/forge-ckpt/src/forge_ckpt"
_MOE = "packages/forge-moe/src/forge_moe"
_PARALLEL = "packages/forge-parallel/src/forge_parallel"
_RESILIENCE = "packages/forge-resilience/src/forge_resilience"
_TRAIN = "apps/train/src/forge_train"
_VLM = "packages/forge-vlm/src/forge_vlm"

MISTAKES: tuple[Mistake, ...] = (
    Mistake(
        "keys turn against the rotation",
        f"{_CORE}/model/rope.py",
        "value=-direction",
        "value=direction",
        ("packages/forge-core/tests/test_model_layers.py",),
    ),
    Mistake(
        "the gradient of a masked label is kept",
        f"{_CORE}/loss/token.py",
        "scale = grads[0] * (valid if weights is None else weights)[:, None]",
        "scale = grads[0] * torch.ones_like(valid)[:, None]",
        ("packages/forge-core/tests/test_loss.py::test_an_ignored_row_has_no_gradient",),
    ),
    Mistake(
        "the first step of an average divides by zero",
        f"{_CORE}/optim/schedule_free.py",
        "correction = -torch.expm1(step *",
        'correction = -torch.expm1(old["step"] *',
        (
            "packages/forge-core/tests/test_optim_schedule_free.py::test_F32_nothing_is_divided_by_zero",
        ),
    ),
    Mistake(
        "weights that train are evaluated in place of their average",
        f"{_TRAIN}/trainer/trainer.py",
        ", self.rows.meter.paused() as pause, self.evaluation_point():",
        ", self.rows.meter.paused() as pause:\n            self.evaluation_point()",
        (
            "tests/use/test_schedule_free.py::test_what_is_evaluated_sampled_saved_and_left_is_the_average",
        ),
    ),
    Mistake(
        "the decay of wsd begins a step late",
        f"{_CORE}/optim/schedule.py",
        "total_steps - steps, total_steps, _SHAPES",
        "total_steps - steps + 1, total_steps, _SHAPES",
        (
            "packages/forge-core/tests/test_schedule.py::test_wsd_is_at_the_peak_until_its_last_steps",
        ),
    ),
    Mistake(
        "all epochs have one order",
        f"{_DATA}/packing.py",
        "self._permutation = epoch, Permutation(self._n, self.seed, epoch)",
        "self._permutation = epoch, Permutation(self._n, self.seed, 0)",
        (
            "packages/forge-data/tests/test_packing.py::test_epochs_have_orders_of_their_own_and_a_batch_may_span_two",
        ),
    ),
    Mistake(
        "a label of a conversation has the weight of the token before it",
        f"{_DATA}/chat/rows.py",
        "weights[start + 1 : start + length]",
        "weights[start : start + length - 1]",
        (
            "packages/forge-data/tests/test_chat_source.py::test_an_epoch_has_each_conversation_once_and_whole",
        ),
    ),
    Mistake(
        "a document predicts the next one",
        f"{_DATA}/packing.py",
        "labels[row, begins - 1] = IGNORE",
        "labels[begins[begins < 0]] = IGNORE",
        (
            "packages/forge-data/tests/test_packing.py::test_F47_the_last_token_of_a_document_does_not_predict_the_next_document",
        ),
    ),
    Mistake(
        "a block is read without a look at its digest",
        f"{_CKPT}/read/blocks.py",
        "if digest_of(block) != entry.blocks[index]:",
        "if not entry.blocks[index]:",
        ("packages/forge-ckpt/tests/test_faults.py::test_F51_flipped_bit_in_a_data_file",),
    ),
    Mistake(
        "a save in the background writes the state of later steps",
        f"{_CKPT}/write/save.py",
        "staged = None if self._staged is None else self._staged.bytes_of_file()",
        "staged = None",
        (
            "packages/forge-ckpt/tests/test_background.py::test_F55_later_changes_are_not_in_the_checkpoint",
        ),
    ),
    Mistake(
        "a failed save waits for the next interval",
        f"{_TRAIN}/trainer/checkpoints.py",
        "self.wants_retry = self._failures == 1",
        "self.wants_retry = False",
        (
            "tests/resume/test_background_saves.py::test_a_save_that_fails_is_made_good_in_the_next_steps",
        ),
    ),
    Mistake(
        "a callback hears of a checkpoint when its own rank does",
        f"{_TRAIN}/trainer/trainer.py",
        "self._announce(self.checkpoints.announce(self._decision.saved))",
        "self._announce(self.checkpoints.announce(self.checkpoints.committed))",
        (
            "tests/resume/test_background_saves.py::test_all_ranks_hear_of_a_checkpoint_in_the_same_step",
        ),
    ),
    Mistake(
        "norms and biases decay",
        f"{_CORE}/optim/groups.py",
        "for name, p in parameters.items() if p.ndim >= 2]",
        "for name, p in parameters.items() if p.ndim >= 1]",
        ("packages/forge-core/tests/test_optim.py::test_decay_is_for_matrices_only",),
    ),
    Mistake(
        "documents of a packed row see each other",
        f"{_CORE}/model/documents.py",
        "changed = (host[:, 1:] != host[:, :-1]).nonzero().tolist()",
        "changed = (host[:, 1:] < host[:, :-1]).nonzero().tolist()",
        ("packages/forge-core/tests/test_model_documents.py::test_model_equals_documents_apart",),
    ),
    Mistake(
        "images that are packed see each other",
        f"{_VLM}/vision/packed.py",
        "plan = SegmentPlan.of_lengths([lengths])",
        "plan = SegmentPlan.of_lengths([[sum(lengths)]])",
        (
            "packages/forge-vlm/tests/test_packed_vit.py::test_pixels_of_a_neighbour_do_not_move_an_image",
        ),
    ),
    Mistake(
        "a window shows one token too many",
        f"{_CORE}/model/rows.py",
        "(ahead < window)",
        "(ahead <= window)",
        ("packages/forge-core/tests/test_model_spec.py",),
    ),
    Mistake(
        "a step is named before its directory is on the disk",
        f"{_CKPT}/write/writer.py",
        "        files.sync_directory(self._temporary)\n",
        "",
        (
            "packages/forge-ckpt/tests/test_crash.py::test_a_step_is_on_the_disk_before_its_name_and_its_name_before_save_returns",
        ),
    ),
    Mistake(
        "new random streams ignore the saved state of torch",
        f"{_CKPT}/rng.py",
        '    digest.update(bytes(stream["torch"].tolist()))\n',
        "",
        ("packages/forge-ckpt/tests/test_rng.py",),
    ),
    Mistake(
        "capacity 1.1 rounds up by one",
        f"{_MOE}/capacity.py",
        " * (1 - 1e-9)",
        "",
        ("packages/forge-moe/tests/test_capacity.py::test_limits",),
    ),
    Mistake(
        "evaluation drops what is over capacity",
        f"{_MOE}/layer.py",
        "return self.training and self.config.capacity_factor is not None",
        "return self.config.capacity_factor is not None",
        (
            "packages/forge-moe/tests/test_evaluation.py::test_F91_a_row_in_eval_depends_on_itself_alone",
        ),
    ),
    Mistake(
        "evaluation counts as load of experts",
        f"{_MOE}/layer.py",
        "self.counters.add(counts, tokens, dropped, entropy.sum(), training=self.training)",
        "self.counters.add(counts, tokens, dropped, entropy.sum(), training=True)",
        (
            "packages/forge-moe/tests/test_evaluation.py::test_F91_an_evaluation_leaves_the_step_alone",
        ),
    ),
    Mistake(
        "a skipped step moves the biases of experts",
        f"{_MOE}/training_step.py",
        "target.copy_(value if skip is None else torch.where(skip > 0, target, value))",
        "target.copy_(value)",
        (
            "packages/forge-moe/tests/test_balance.py::test_update_ends_a_step_once_and_skip_masks_it",
        ),
    ),
    Mistake(
        "a cut weight is shown to all code",
        f"{_PARALLEL}/axes/local.py",
        "if parameter.placements[0].is_shard() and not module.in_forward:",
        "if parameter.placements[0].is_shard() and module.in_forward is None:",
        (
            "packages/forge-parallel/tests/test_tensor_foreign.py::test_F87_a_cut_weight_is_refused_to_other_code",
        ),
    ),
    Mistake(
        "weights of an evaluation stay gathered",
        f"{_PARALLEL}/axes/fsdp.py",
        "        module.reshard()  # type: ignore[operator]",
        "        pass",
        (
            "packages/forge-parallel/tests/test_stale.py::test_F88_weights_put_back_after_an_evaluation_are_used",
        ),
    ),
    Mistake(
        "parameters unused on a rank are not reduced",
        f"{_PARALLEL}/axes/fsdp.py",
        "    reduce_unused_parameters(units)\n",
        "",
        (
            "packages/forge-parallel/tests/test_unused.py::test_F86_ranks_that_take_different_branches_have_the_gradients_of_one_process",
        ),
    ),
    Mistake(
        "the learning rate of the step before",
        f"{_TRAIN}/trainer/trainer.py",
        "factor = self.schedule(self.course.scheduled(step, tokens))",
        "factor = self.schedule(self.course.scheduled(max(step - 1, 1), tokens))",
        ("tests/use/test_runner_by_values.py::test_the_runner_equals_a_loop_by_hand",),
    ),
    Mistake(
        "a run of tokens is rounded down",
        f"{_TRAIN}/trainer/course.py",
        "steps = point.steps + math.ceil((tokens - point.tokens) / of_step)",
        "steps = point.steps + math.floor((tokens - point.tokens) / of_step)",
        ("tests/use/test_runner_by_values.py::test_the_runner_equals_a_loop_by_hand",),
    ),
    Mistake(
        "gradients of a token's experts are summed in 16 bits",
        f"{_MOE}/dispatch/exchange.py",
        "wide = torch.promote_types(layout.dtype, torch.float32)",
        "wide = layout.dtype",
        (
            "packages/forge-moe/tests/test_dispatch_ranks.py::test_gradients_of_a_token_from_several_ranks_are_summed_in_fp32",
        ),
    ),
    Mistake(
        "a worker that replaces another is asked for its steps in another order",
        f"{_DATA}/workers.py",
        "                for again in steps:\n",
        "                for again in reversed(steps):\n",
        (
            "packages/forge-data/tests/test_workers.py::test_a_worker_that_dies_is_named_and_replaced_with_nothing_lost_or_repeated[SIGKILL]",
        ),
    ),
    Mistake(
        "sequences of an index are taken to follow one another",
        f"{_DATA}/sources/megatron.py",
        "        if wrong.size:\n",
        "        if wrong.size > len(lengths):\n",
        (
            "packages/forge-data/tests/test_formats.py::test_F93_damage_is_one_line_before_a_row_is_read",
        ),
    ),
    Mistake(
        "the digest chain is not compared at a resume",
        f"{_DATA}/loader.py",
        "        problem = _state_problem(state)\n",
        "        problem = None\n",
        (
            "packages/forge-data/tests/test_loader.py::test_F97_a_cursor_that_is_not_where_the_chain_of_digests_ends",
        ),
    ),
    Mistake(
        "a sink that hangs is waited for at each save",
        f"{_TRAIN}/metrics/background.py",
        "if self._last_flush is not None and not self._last_flush.is_set():",
        "if self._last_flush is not None and self._last_flush.is_set() is None:",
        ("apps/train/tests/test_sinks.py::test_a_hanging_sink_is_flushed_once_until_it_answers",),
    ),
    Mistake(
        "a block that was frozen at first sums gradients in bf16 ever after",
        f"{_PARALLEL}/axes/fsdp.py",
        "        refresh_grad_dtypes(module)",
        "        pass",
        ("packages/forge-parallel/tests/test_freeze.py",),
    ),
    Mistake(
        "a frozen group keeps its gradients",
        f"{_CORE}/optim/groups.py",
        "parameter.requires_grad_(multiplier != 0.0)",
        "parameter.requires_grad_(True)",
        ("packages/forge-core/tests/test_optim_groups.py",),
    ),
    Mistake(
        "a stage begins a step late",
        f"{_CORE}/optim/stages.py",
        "stage.start_step <= step:",
        "stage.start_step < step:",
        ("tests/use/test_optimizer_groups.py::test_the_runner_equals_a_loop_by_hand",),
    ),
    Mistake(
        "tensors of a safetensors file may share bytes",
        f"{_CKPT}/hf/headers.py",
        "if entry.start != end:",
        "if entry.start > end:",
        ("packages/forge-ckpt/tests/test_safetensors.py",),
    ),
    Mistake(
        "a run begins from fresh weights where an import is",
        f"{_TRAIN}/trainer/checkpoints.py",
        "if self._store.steps() == [0] and",
        "if self._store.steps() == [] and",
        ("tests/use/test_hugging_face.py::test_F57_F58_imported_weights_train_and_go_back",),
    ),
    Mistake(
        "a fork that has saved looks at its parent again",
        f"{_TRAIN}/trainer/fork.py",
        "if init.from_ is None or has_begun(run_dir):",
        "if init.from_ is None:",
        ("tests/resume/test_forks.py::test_a_fork_of_a_folder_of_hugging_face_is_an_import",),
    ),
    Mistake(
        "a warm start goes on in the parent's data",
        f"{_TRAIN}/trainer/fork.py",
        'rest = (*_CURSOR, *self.saved) if "cursor" in self.init.keep else ()',
        "rest = (*_CURSOR, *self.saved)",
        (
            "tests/resume/test_forks.py::test_a_warm_start_is_a_new_run_with_weights_and_moments_put_in_by_hand",
        ),
    ),
    Mistake(
        "each rank loads the step that it found itself",
        f"{_CKPT}/read/load.py",
        "chosen = Path(ranks.run_on_rank_0(lambda: str(step_path(Path(path)))))",
        "chosen = step_path(Path(path))",
        ("tests/resume/test_forks.py::test_ranks_that_found_other_steps_take_one",),
    ),
    Mistake(
        "a fork goes on with heads of another number",
        f"{_TRAIN}/trainer/fork.py",
        'or (goes_on and k.startswith("model.")',
        'or (False and k.startswith("model.")',
        ("tests/resume/test_fork_refusals.py::test_refusals",),
    ),
    Mistake(
        "tensors of another model begin fresh without a word",
        f"{_TRAIN}/trainer/fork.py",
        "if init.patterns or not (report.fresh or report.unused):",
        "if True:",
        ("tests/resume/test_fork_refusals.py::test_refusals",),
    ),
    Mistake(
        "a stage without a tensor that matches refuses the patterns",
        f"{_CKPT}/weights.py",
        "lambda: _match(here if names is None else names, shapes, patterns)",
        "lambda: _match(here, shapes, patterns)",
        (
            "packages/forge-ckpt/tests/test_weights.py::test_a_part_of_a_model_has_the_report_of_the_whole",
        ),
    ),
    Mistake(
        "a load compares the first block of a file only",
        f"{_CKPT}/read/blocks.py",
        "if digest_of(block) != entry.blocks[index]:",
        "if index == 0 and digest_of(block) != entry.blocks[index]:",
        ("packages/forge-ckpt/tests/test_corruption.py",),
    ),
    Mistake(
        "plans that are kept do not look at placements",
        f"{_CKPT}/write/planner.py",
        "return type(value), value.dtype, tuple(value.shape), layout",
        "return type(value), value.dtype, tuple(value.shape), None",
        (
            "packages/forge-ckpt/tests/test_async_exact.py::test_states_whose_structure_changes_between_saves",
        ),
    ),
    Mistake(
        "a rename is not durable when a save returns",
        f"{_CKPT}/directories.py",
        "    sync_directory(target.parent)  #",
        "    pass  #",
        (
            "packages/forge-ckpt/tests/test_async_exact.py::test_a_checkpoint_is_on_the_disk_before_its_name_and_its_name_before_the_old_one_goes",
        ),
    ),
    Mistake(
        "a background save that fails before its copy is told to nobody",
        f"{_CKPT}/write/saver.py",
        "            self._background.fail(error)",
        "            pass",
        (
            "packages/forge-ckpt/tests/test_background.py::test_a_failure_before_the_copy_is_raised_at_the_end_too",
        ),
    ),
    Mistake(
        "names from a disk are printed as they are",
        f"{_CKPT}/errors.py",
        "c if c.isprintable() else ascii(c)[1:-1]",
        "c",
        (
            "packages/forge-ckpt/tests/test_manifest_fuzz.py::test_F97_names_and_encodings_that_no_message_can_hold",
        ),
    ),
    Mistake(
        "of two copies that differ one is called the wrong one",
        f"{_RESILIENCE}/replicas.py",
        "known = 2 * count > len(values)",
        "known = 2 * count >= len(values)",
        ("packages/forge-resilience/tests/test_replicas.py::test_of_two_copies_both_are_named",),
    ),
    Mistake(
        "a checksum is a weighted sum, in which two changes cancel",
        f"{_RESILIENCE}/replicas.py",
        "        _fold_(x, shift).mul_(factor)",
        "        x.mul_(factor)",
        (
            "packages/forge-resilience/tests/test_replicas.py::test_each_bit_and_each_exchange_of_places_shows",
        ),
    ),
    Mistake(
        "copies of a tensor are looked for along the axes that shard it",
        f"{_RESILIENCE}/replicas.py",
        "slice(None) if p.is_replicate() else i",
        "i if p.is_replicate() else slice(None)",
        (
            "packages/forge-resilience/tests/test_replicas.py::test_copies_are_along_the_axes_that_replicate",
        ),
    ),
    Mistake(
        "a node that is broken together with most others is blamed",
        f"{_RESILIENCE}/health/check.py",
        "return nodes if several == 1 or 2 * len(nodes) <= several else []",
        "return nodes",
        (
            "packages/forge-resilience/tests/test_health.py::test_all_ranks_get_one_report_with_ranks_and_nodes",
        ),
    ),
    Mistake(
        "nodes of an earlier life are excluded, too",
        f"{_RESILIENCE}/health/exclude.py",
        "            nodes.clear()",
        "            pass",
        (
            "packages/forge-resilience/tests/test_health.py::test_the_nodes_of_the_last_life_that_are_known_to_be_broken",
        ),
    ),
    Mistake(
        "old errors of a GPU are taken for new ones",
        f"{_RESILIENCE}/health/nvml.py",
        "new = count - self._uncorrected",
        "new = count",
        (
            "packages/forge-resilience/tests/test_health.py::test_errors_of_an_earlier_process_are_a_warning",
        ),
    ),
    Mistake(
        "an event is sent at each look into the journal",
        f"{_RESILIENCE}/alerts.py",
        "            self.offset = end",
        "            self.offset = self.offset",
        (
            "packages/forge-resilience/tests/test_alerts.py::test_new_events_reach_both_ways_once_and_others_none",
        ),
    ),
    Mistake(
        "a failed alert shows the words of its command",
        f"{_RESILIENCE}/alerts.py",
        "problem = type(error).__name__",
        "problem = str(error)",
        (
            "packages/forge-resilience/tests/test_alerts.py::test_a_command_that_fails_is_told_without_its_words",
        ),
    ),
    Mistake(
        "branches of a document see each other",
        f"{_VLM}/mask.py",
        "together = together & ((branch == 0) | (branch == branches[row, query]))",
        "together = together & (branch >= 0)",
        (
            "packages/forge-vlm/tests/test_branches.py::test_a_tree_is_its_separate_rows[joint_decoder]",
            "packages/forge-vlm/tests/test_mask.py::test_each_backend_equals_the_reference[None-None]",
        ),
    ),
    Mistake(
        "tokens of one image do not see those behind them",
        f"{_VLM}/mask.py",
        "((key <= query) | ahead)",
        "(key <= query)",
        (
            "packages/forge-vlm/tests/test_mask.py::test_each_backend_equals_the_reference[None-image]",
            "packages/forge-vlm/tests/test_bidirectional.py::test_one_layer_sees_what_the_plan_says[image]",
        ),
    ),
    Mistake(
        "a window of streamed pictures begins at its last sample",
        f"{_VLM}/data/shards.py",
        "place, samples = batch[0][0], [",
        "place, samples = batch[-1][0], [",
        ("packages/forge-vlm/tests/test_shards.py::test_a_reader_begins_at_the_place_of_a_window",),
    ),
    Mistake(
        "rows of a window are shuffled by how many shards a process reads",
        f"{_VLM}/data/shards.py",
        'order_of(len(rows), _seed(self.seed, f"window {shard}"), place)',
        "order_of(len(rows), len(self._shards), place)",
        ("packages/forge-vlm/tests/test_shards.py::test_rows_depend_on_seed_and_number_alone",),
    ),
    Mistake(
        "units of another plan are taken",
        f"{_VLM}/data/prepare.py",
        "plan.read_text() != said",
        "False",
        ("packages/forge-vlm/tests/test_prepare.py::test_units_of_another_plan_are_not_taken",),
    ),
    Mistake(
        "parts of points under tp go to the wrong ranks",
        f"{_PARALLEL}/points.py",
        "return value.chunk(self.tp.size, dim)[self.tp.rank]",
        "return value.chunk(self.tp.size, dim)[self.tp.rank - 1]",
        ("tests/parallel/test_points_in_layouts.py",),
    ),
    Mistake(
        "a replay begins one checkpoint too late",
        f"{_TRAIN}/study/private_job.py",
        "before = [s for s in steps if s < step]",
        "before = [s for s in steps if s <= step]",
        ("tests/use/test_time_machine.py",),
    ),
    Mistake(
        "compute-optimal sizes take the exponent of the other term",
        f"{_CORE}/scaling.py",
        "parameters = scale * product ** (self.beta / total)",
        "parameters = scale * product ** (self.alpha / total)",
        ("packages/forge-core/tests/test_scaling.py",),
    ),
)
