"""Layer specs of a user's own, as ``--spec ranks.own_specs NAME`` finds them."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

from megatron_scalevec import ScaleVecConfig
from megatron_scalevec.specs import scalevec_layer_spec


def _layers():
    return get_gpt_layer_local_spec(normalization="RMSNorm")


def _blocks(config, vp_stage=None):
    return get_gpt_decoder_block_spec(
        config.transformer, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )


stock = _layers()
layer = scalevec_layer_spec(_layers(), ScaleVecConfig(strategy="unified"))
block = scalevec_layer_spec(_blocks, ScaleVecConfig(strategy="unified"))
