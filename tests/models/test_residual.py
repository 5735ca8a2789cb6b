"""The attention residual against the golden mix and a plain walk over the layers; SiTU and the gated norm."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_kv.models.config import KimiLinearConfig
from hybrid_kv.models.norms import gated_rms_norm
from hybrid_kv.models.published import named
from hybrid_kv.models.residual import AttentionResidual, PlainResidual, Stream, attention_mix, residual
from pallas_kernels.experts import SILU, Activation
from tests.kernels import golden

FILE = golden.load("misc_ops")


def test_situ_agrees_with_the_golden_file():
    gate, up = jnp.asarray(FILE["situ_gate"]), jnp.asarray(FILE["situ_up"])
    bounded = Activation(4.0, 25.0).plain(gate, up)
    assert golden.rel_rmse(bounded, FILE["situ_beta4_linear25"]) <= 1e-6
    assert golden.rel_rmse(Activation(1.0).plain(gate, up), FILE["situ_beta1_nolinear"]) <= 1e-6
    huge = Activation(4.0, 25.0).plain(jnp.full(4, 1e4), jnp.array([1e4, -1e4, 1e30, 0.0]))
    np.testing.assert_array_equal(huge, [100, -100, 100, 0])
    assert Activation(4.0, 25.0).plain(gate.astype(jnp.bfloat16), up).dtype == jnp.bfloat16
    np.testing.assert_allclose(SILU.plain(gate, up), FILE["situ_gate"] / (1 + np.exp(-FILE["situ_gate"])) * up, 1e-5)


def test_the_gated_norm_agrees_with_the_golden_file():
    got = gated_rms_norm(*(jnp.asarray(FILE[f"norm_{x}"]) for x in ("x", "gate", "weight")), float(FILE["norm_eps"]))
    assert golden.rel_rmse(got, FILE["gated_norm"]) <= 1e-6


def test_the_mix_agrees_with_the_golden_file_and_sees_no_block_beyond_its_count():
    total, blocks = jnp.asarray(FILE["res_prefix"]), jnp.asarray(FILE["res_blocks"]).swapaxes(0, 1)
    site = [jnp.asarray(FILE["res_norm_weight"]), jnp.asarray(FILE["res_proj_weight"]), float(FILE["res_eps"])]
    wider = jnp.concatenate([blocks, jnp.full((2, *total.shape), 1e6)])
    for bank, seen, want in ((blocks, 3, "res_out"), (wider, 3, "res_out"), (wider, 0, "res_out_no_blocks")):
        got = attention_mix(Stream(total, bank), jnp.int32(seen), *site)
        assert golden.rel_rmse(got, FILE[want]) <= 1e-6
    np.testing.assert_array_equal(attention_mix(Stream(total, wider), jnp.int32(0), *site), total)
    np.testing.assert_array_equal(attention_mix(Stream(total, blocks[:0]), jnp.int32(0), *site), total)


def small(layers: int, block: int) -> tuple[KimiLinearConfig, dict]:
    raw = named("tiny-k3")["text_config"] | {"num_hidden_layers": layers, "attn_res_block_size": block}
    raw["linear_attn_config"] |= {"kda_layers": [*range(1, layers)], "full_attn_layers": [layers]}
    config, rng = KimiLinearConfig.from_dict(raw), np.random.default_rng(layers)
    shapes = {"mixer_norm": (layers, 8), "mixer_proj": (layers, 1, 8), "ffn_norm": (layers, 8),
              "ffn_proj": (layers, 1, 8), "head_norm": (8,), "head_proj": (1, 8)}  # fmt: skip
    return config, {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def walk(config: KimiLinearConfig, params: dict, dtype, embedded, outputs):
    """What every site reads, by lists of finished blocks; sums are rounded to `dtype`."""

    def mix(bank, total, norm, proj):
        sources = np.stack([*bank, total]).astype(np.float64)
        normed = sources / np.sqrt((sources**2).mean(-1, keepdims=True) + config.rms_norm_eps) * norm
        weight = np.exp(normed @ proj[0])
        return (weight / weight.sum(0)).T[:, None] @ sources.swapaxes(0, 1)

    def add(a, b):
        return (jnp.asarray(a, dtype) + jnp.asarray(b, dtype)).astype(jnp.float32)

    read, bank, total = [], [], embedded
    for i, (mixed, fed) in enumerate(outputs):
        read.append(mix(bank, total, params["mixer_norm"][i], params["mixer_proj"][i]))
        if i % config.residual_block == 0:
            bank, total = [*bank, total], mixed
        else:
            total = add(total, mixed)
        read.append(mix(bank, total, params["ffn_norm"][i], params["ffn_proj"][i]))
        total = add(total, fed)
    read.append(mix(bank, total, params["head_norm"], params["head_proj"]))
    return np.stack(read)[:, :, 0], total, bank


@pytest.mark.parametrize(("layers", "block"), [(7, 2), (6, 3), (5, 12), (4, 1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_site_reads_the_blocks_finished_by_then(layers, block, dtype):
    config, params = small(layers, block)
    rng = np.random.default_rng(1)
    embedded = np.asarray(jnp.asarray(rng.normal(size=(3, 8)), dtype).astype(jnp.float32))
    outputs = np.asarray(jnp.asarray(rng.normal(size=(layers, 2, 3, 8)), dtype).astype(jnp.float32))

    @partial(jax.jit, static_argnums=0)
    def run(config, params, embedded, outputs):
        sites = residual(config, params)

        def layer(stream, x):
            i, (mixed, fed) = x
            before = sites.before_mixer(stream, i)
            stream = sites.after_mixer(stream, mixed, i)
            between = sites.before_ffn(stream, i)
            return sites.after_ffn(stream, fed), jnp.stack([before, between])

        stream, read = jax.lax.scan(layer, sites.start(embedded), (jnp.arange(layers), (outputs[:, 0], outputs[:, 1])))
        return jnp.concatenate([read.reshape(-1, 3, 8), sites.before_head(stream)[None]]), stream

    read, stream = run(config, params, jnp.asarray(embedded, dtype), jnp.asarray(outputs, dtype))
    want, total, bank = walk(config, params, dtype, embedded, outputs)
    assert read.dtype == dtype
    assert golden.rel_rmse(read.astype(jnp.float32), want) <= (1e-6 if dtype == jnp.float32 else 4e-3)
    np.testing.assert_array_equal(stream.total.astype(jnp.float32), total)
    np.testing.assert_array_equal(stream.bank.astype(jnp.float32), np.stack(bank))
    assert len(bank) == config.residual_blocks


def test_the_form_follows_the_configuration():
    config, params = small(4, 2)
    assert type(residual(config, jax.tree.map(jnp.asarray, params))) is AttentionResidual
    plain = residual(KimiLinearConfig.from_dict(named("tiny-kimi-linear")), {})
    assert type(plain) is PlainResidual
    x = jnp.ones((2, 8))
    stream = plain.after_ffn(plain.after_mixer(plain.start(x), 2 * x, jnp.int32(0)), 3 * x)
    for read in (plain.before_mixer(stream, jnp.int32(1)), plain.before_ffn(stream, jnp.int32(1))):
        np.testing.assert_array_equal(read, 6 * x)
    np.testing.assert_array_equal(plain.before_head(stream), 6 * x)
