"""Faults of ranks. Each is given the module that it changes, the first step that has it, and a step's responses."""

from dataclasses import replace


def _rank_step(module, change):
    """Calls `change(actor, step, phase)` before a rank scores a step, and before it updates."""
    kind = module.RankStep
    score, update = kind.score, kind.update
    count = {"steps": 0}

    def scored(self, *arguments):
        if not self._rows.only_gaps:
            count["steps"] += 1
            change(self._actor, count["steps"], "score")
        return score(self, *arguments)

    def updated(self):
        change(self._actor, count["steps"], "update")
        return update(self)

    kind.score, kind.update = scored, updated


def _is_last(actor):
    return actor.rank == actor.layout.world_size - 1


def learning_rate(module, first, _):
    """Ten times as high."""

    def change(actor, step, phase):
        if phase == "update" and step == first:
            for group in actor.optimizer.param_groups:
                group["max_lr"] *= 10
                group["min_lr"] *= 10
            actor.scheduler.step(0)

    _rank_step(module, change)


def adam_lost(module, first, _):
    """Moments are zero after a resume; `first` counts the steps of this process."""

    def change(actor, step, phase):
        if phase == "update" and step == first:
            from mrl.rank.rank_parameters import rank_parameters

            for each in rank_parameters(actor):
                if each.optimizer is not None:
                    for values in each.adam.moments(each.main()).values():
                        if values.is_floating_point() and values.dim():
                            values.zero_()

    _rank_step(module, change)


def softmax(module, first, _):
    """A wrong scale of attention on the last rank."""

    def change(actor, step, phase):
        if phase == "score" and step == first and _is_last(actor):
            from mrl.rank.attention import CausalAttention

            for chunk in actor.chunks:
                for layer in chunk.modules():
                    if isinstance(layer, CausalAttention):
                        layer.softmax_scale = 0.1

    _rank_step(module, change)


def tensor_scale(module, first, _):
    """A wrong scale of attention on the last of several tensor ranks: in the software, so that replays have it, too."""
    kind = module.RankStep
    score = kind.score

    def scored(self, *arguments):
        from megatron.core import parallel_state as mpu

        actor = self._actor
        is_last = mpu.get_tensor_model_parallel_rank() == actor.layout.tensor - 1 > 0
        if is_last and actor.num_updates >= (first - 1) * actor.config.updates_per_step:
            from mrl.rank.attention import CausalAttention

            for chunk in actor.chunks:
                for layer in chunk.modules():
                    if isinstance(layer, CausalAttention) and not hasattr(layer, "planted"):
                        layer.planted = True
                        layer.softmax_scale = 3 * actor.model.head_dim**-0.5
        return score(self, *arguments)

    kind.score = scored


def router_bits(module, first, _):
    """Of its logits the router keeps whole numbers in bfloat16: a kernel of one format, which replays have, too."""
    kind = module.RankStep
    score = kind.score
    now = {"broken": False}

    def scored(self, *arguments):
        import torch
        from megatron.core.transformer.moe.router import TopKRouter

        actor = self._actor
        now["broken"] = actor.num_updates >= (first - 1) * actor.config.updates_per_step
        gating = TopKRouter.gating
        if not hasattr(gating, "planted"):

            def rounded(router, values):
                logits = gating(router, values)
                if not now["broken"] or values.dtype != torch.bfloat16:
                    return logits
                return logits + (logits.round() - logits).detach()

            rounded.planted = True
            TopKRouter.gating = rounded
        return score(self, *arguments)

    kind.score = scored


def rank_temperature(module, first, _):
    """Ranks compute with another temperature than engines sample with."""

    def change(actor, step, phase):
        if phase == "score" and step == first:
            config = actor.config
            rollout = config.rollout.model_copy(update={"temperature": 0.6})
            actor.config = config.model_copy(update={"rollout": rollout})

    _rank_step(module, change)


def _of_gradients(module, first, damage, once=False):
    """Calls `damage(values)` for gradients of the last rank, before they are summed (gradients are not overlapped).

    With `once` for those of one update: the trainer guards its weights, and ends a run that goes on so.
    """
    now = {"damaged": False}

    def damaging(chunk):
        finish = chunk.finish_grad_sync

        def finished(*arguments, **named):
            if now["damaged"]:
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    damage(buffer.grad_data)
                now["damaged"] = not once
            return finish(*arguments, **named)

        chunk.finish_grad_sync = finished

    def change(actor, step, phase):
        if not now.get("hooked"):
            now["hooked"] = True
            assert not actor.chunks[0].ddp_config.overlap_grad_reduce
            for chunk in actor.chunks:
                damaging(chunk)
        now["damaged"] = (step == first and phase == "update" if once else step >= first) and _is_last(actor)

    _rank_step(module, change)


def gradients(module, first, _):
    """The last replica's are lost."""
    _of_gradients(module, first, lambda values: values.zero_())


def not_a_number(module, first, _):
    """NaN in gradients, from which the trainer guards its weights."""
    _of_gradients(module, first, lambda values: values[:1].fill_(float("nan")), once=True)


def clip(module, first, _):
    """A band that clips nothing."""

    def change(actor, step, phase):
        if step == first:
            wide = {"clip_ratio_low": 0.999, "clip_ratio_high": 10.0}
            actor.loss_parameters = replace(actor.loss_parameters, **wide)

    _rank_step(module, change)


def kl_sign(module, first, _):
    """The loss pays for the distance to the reference."""

    def change(actor, step, phase):
        if step == first and phase == "score":
            own = actor.loss_parameters
            actor.loss_parameters = replace(own, kl_loss_coef=-own.kl_loss_coef)

    _rank_step(module, change)


def routes(module, first, _):
    """Routes of other rows are replayed."""
    read = module.read_routes
    count = {"steps": 0}

    def read_rolled(*arguments):
        import numpy as np

        found = read(*arguments)
        count["steps"] += 1
        if count["steps"] >= first:
            found = replace(found, values=np.roll(found.values, 11 * 8, axis=0))
        return found

    module.read_routes = read_rolled


def old_weights(module, first, _):
    """Engines get the weights of two syncs ago, under the number of the newest."""
    kind = module.ActorWorker
    send = kind.send_weights
    kept = []

    def sent(self, *arguments):
        import torch

        parameters = [p for chunk in self.actor.chunks for p in chunk.parameters()]
        now = [p.detach().clone() for p in parameters]
        kept.append(now)
        if len(kept) < first or len(kept) < 3:
            return send(self, *arguments)
        with torch.no_grad():
            for parameter, old in zip(parameters, kept[-3], strict=True):
                parameter.data.copy_(old)
        try:
            return send(self, *arguments)
        finally:
            with torch.no_grad():
                for parameter, new in zip(parameters, now, strict=True):
                    parameter.data.copy_(new)

    kind.send_weights = sent
