"""Sizes by field name, and what single families need besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Gemma4AssistantConfig, Gemma4TextConfig, PreTrainedConfig

SIZES: dict[str, Any] = {
    # widths
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "embed_dim": 32, "dim": 32, "emb_dim": 32, "embedding_size": 32, "embedding_dim": 32,
    "word_embed_proj_dim": 32, "out_hidden_size": 32, "text_hidden_size": 32, "projection_dim": 32, "projector_hidden_size": 32,
    "output_dim": 32, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "projection_hidden_size": 32,
    "encoder_hidden_size": 32, "vision_hidden_size": 32, "adapter_out_dim": 32, "adapter_in_dim": 32, "image_text_hidden_size": 32,
    "intermediate_size": 48, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "ffn_hidden_size": 48, "mlp_dim": 48, "dim_ff": 48,
    "dff": 48, "d_ff": 48, "d_inner": 48, "n_inner": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16, "intermediate_size_mlp": 48, "shared_intermediate_size": 16, "dense_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 16, "share_expert_dim": 16, "shared_experts_intermediate_size": 16, "feed_forward_size": 48,
    "alignment_intermediate_size": 32, "projection_intermediate_size": 48, "moe_hidden_size": 32, "downsample_hidden_size": 16,
    # depths
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4, "encoder_layers": 2, "layers": 4, "depth": 2,
    "num_decoder_layers": 4, "num_encoder_layers": 2, "num_blocks": 4, "conf_num_hidden_layers": 2, "num_layers_per_stack": 2,
    # heads
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "num_sliding_attention_heads": 4, "head_dim": 8, "swa_head_dim": 8,
    "v_head_dim": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "o_lora_rank": 16,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 64, "d_kv": 8, "dim_head": 8, "d_head": 8, "kv_channels": 8, "rotary_dim": 4,
    "attention_head_size": 8, "global_head_dim": 8,
    # experts
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2,
    "zero_expert_num": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    # recurrent
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_head_dim": 8,
    "linear_num_heads": 4, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "ssm_state_size": 8, "state_size": 8, "time_step_rank": 4, "mamba_dt_rank": 4, "mamba_d_ssm": 64, "chunk_size": 8, "mamba_chunk_size": 8,
    "lru_width": 32, "attention_hidden_size": 32,
    # vocabularies and positions
    "vocab_size": 99, "decoder_vocab_size": 99, "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "audio_vocab_size": 20,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_seq_len": 128, "max_target_positions": 128, "context_length": 128,
    "max_source_positions": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sep_token_id": 4, "cls_token_id": 5,
    "decoder_start_token_id": 1,
    # rules that must be seen
    "logit_scale": 0.25, "logits_scaling": 4.0, "final_logit_softcapping": 3.0, "logits_soft_cap": 3.0, "output_logit_soft_cap": 3.0,
    "lm_head_multiplier": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "output_multiplier": 0.4, "logits_mup_width_multiplier": 4.0,
    "scale_emb": 3, "dim_model_base": 16, "unpadded_vocab_size": 93, "embedding_scale": 3.0,
    # vision and sound
    "image_size": 16, "patch_size": 4, "num_channels": 3, "num_mel_bins": 8, "num_position_embeddings": 16, "num_filters": 4,
    "base_channels": 32, "channel_multiplier": (1, 1), "num_res_blocks": 1, "latent_channels": 32, "codebook_size": 16, "num_embeddings": 16,
    "image_token_embed_dim": 32, "output_channels": 32, "max_num_patches": 16, "num_patches": 16, "projector_input_size": 32,
    "hidden_size_global": 32,
}  # fmt: skip

WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "local_attention", "attention_chunk_size")
"""How far back blocks with a sliding window see."""
FORCED = ("num_key_value_heads", "head_dim", "n_routed_experts", "num_experts_per_tok", "logit_scale", "final_logit_softcapping", "sliding_window")
"""Fields that are set although their default is None."""

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
_MIXED = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

FIXES: dict[str, dict[str, Any]] = {
    "Apertus1p5Config": {"image_token_offset": 67, "audio_token_offset": 83},
    "BailingHybridConfig": {"layer_group_size": 2},
    "BambaConfig": {"attn_layer_indices": [1, 3]},
    "BigBirdConfig": {"attention_type": "original_full"},
    "BltConfig": {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3, 4]},
    "BltLocalEncoderConfig": {"num_hidden_layers": 2}, "BltPatcherConfig": {"num_hidden_layers": 2},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 90, "IMGIMGBZ": 92, "IMGIMGCZ": 93}},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "Cosmos3EdgeTextConfig": {"rope_parameters": _MROPE},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
    "DeepseekOcr2SamVisionConfig": {"downsample_channels": [32, 64]},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "DoryConfig": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "Dots1Config": {"n_shared_experts": 1},
    "Dots3NoteTextConfig": {"use_sliding_window": False}, "Dots3NoteAudioConfig": {"adapter_input_size": 32},
    "Dots3NoteVisionConfig": {"pyramid_num_routed": [-1, 2]},
    "Emu3Config": {"vocabulary_map": {"<image>": 90, "<|extra_200|>": 91}},
    "Ernie4_5_VLMoeTextConfig": {"moe_intermediate_size": [16, 16], "rope_parameters": _MROPE | {"mrope_section": [1, 1, 2]}},
    "FastVlmConfig": {"vision_config": _CLIP},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3TextConfig": {"layer_types": _WINDOWS},
    "Gemma3nTextConfig": {"layer_types": _WINDOWS, "num_kv_shared_layers": 2, "laurel_rank": 8, "intermediate_size": 48},
    "Gemma4AssistantConfig": {
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 32, "num_hidden_layers": 4, "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
            "vocab_size": 99,
        },
    },
    "Glm46VTextConfig": {"rope_parameters": _MROPE}, "Glm4vTextConfig": {"rope_parameters": _MROPE}, "GlmOcrTextConfig": {"rope_parameters": _MROPE},
    "Glm4vMoeTextConfig": {"rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}},
    "Glm5NextTextConfig": {"qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 2},
    "Granite4VisionConfig": {
        "vision_config": _CLIP | {"hidden_size": 64}, "deepstack_layer_map": [[1, 0]], "downsample_rate": "1/2", "spatial_target_layers": [1],
    },
    "GraniteMoeHybridConfig": {"layer_types": _MIXED},
    "HunYuanVLTextConfig": {"rope_parameters": _MROPE | {"mrope_section": [1, 1, 1, 1]}},
    "HYV4VLTextConfig": {"rope_parameters": _MROPE},
    "InklingVisionConfig": {"num_hidden_layers": 2},
    "HYV4VLVisionConfig": {"max_image_size": 64},
    "Inkling2VisionConfig": {"projection_hidden_dim": 32, "posemb_grid_size": 4},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearConfig": {"layer_types": _MIXED, "num_local_experts": 4},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "Mamba2Config": {"head_dim": 16, "n_groups": 2},
    "Molmo2VisionConfig": {"image_size": [16, 16]}, "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "MllamaTextConfig": {"cross_attention_layers": [1]},
    "MuseSparkAudioConfig": {"num_hidden_layers": 4, "hidden_sizes": (8, 8, 16, 32), "depths": (1, 1, 1, 1)},
    "NemotronHConfig": {"n_groups": 2},
    "PaddleOCRTextConfig": {"rope_parameters": _MROPE},
    "PerceptionLMConfig": {"vision_config": _CLIP | {"model_args": {"embed_dim": 32}}},
    "Phi4MultimodalAudioConfig": {"nemo_conv_channels": 32, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32},
    "Qwen2VLTextConfig": {"rope_parameters": _MROPE}, "Qwen2_5_VLTextConfig": {"rope_parameters": _MROPE},
    "Qwen2_5OmniTextConfig": {"rope_parameters": _MROPE},
    "Qwen4ExpTextConfig": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2},
    "RadioConfig": {"video_temporal_patch_size": 2, "max_img_size": 32},
    "ReformerConfig": {
        "is_decoder": True, "attn_layers": ["local", "lsh", "local", "lsh"], "axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 16), "hash_seed": 3,
        "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 4,
    },
    "RoCBertConfig": {"shape_vocab_size": 20, "pronunciation_vocab_size": 20, "shape_embed_dim": 8, "pronunciation_embed_dim": 8},
    "UnlimitedOcrSamVisionConfig": {"downsample_channels": (32, 64)},
    "WavTokenizerEncoderConfig": {"codebook_dim": 32},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {
        "attention_hidden_size": 64, "attention_head_dim": 16, "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
    },
    "Zamba2Config": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"], "n_mamba_heads": 4},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "xLSTMConfig": {"chunk_size": 64},
}  # fmt: skip
"""By configuration class: fields that its own rules ask for."""

DEFAULTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "Gemma4AssistantConfig": lambda: Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_hidden_layers=30, num_kv_shared_layers=30)
    ),
}
"""Configurations that cannot be made without arguments."""

TEXT_PARTS = ("text_config", "decoder", "decoder_config", "thinker_config", "llm_config", "language_config")
"""Names under which wrappers keep the configuration of what speaks."""

INNER = {
    "BlipForConditionalGeneration": "text_decoder", "Blip2ForConditionalGeneration": "language_model",
    "InstructBlipForConditionalGeneration": "language_model", "InstructBlipVideoForConditionalGeneration": "language_model",
    "Kosmos2ForConditionalGeneration": "text_model", "Llama4ForConditionalGeneration": "language_model",
}  # fmt: skip
"""Wrappers whose own forward demands an image, and where their text model is."""

SKIPPED = {"MllamaForCausalLM": (1,), "MllamaForConditionalGeneration": (1,)}
"""Blocks that a pass without an image leaves out."""
UNTAPPED = ("CpmAntForCausalLM", "ReformerModelWithLMHead", "XLNetLMHeadModel")
"""Classes whose blocks give other rows than the tokens': of a prompt before them, of padding behind them, or one row a place and not one a text."""
BOTH_WAYS = ("CpmAntForCausalLM", "ReformerModelWithLMHead", "XLNetLMHeadModel", "PaliGemmaForConditionalGeneration")
"""Classes whose states of a text change with later tokens: prefixes attended both ways, permutations, hashing. Capture refuses them."""
MIXED = (
    "DeepseekV4ForCausalLM", "HYV4ForCausalLM", "HYV4VLForConditionalGeneration", "Glm5NextForConditionalGeneration", "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration", "Gemma3nForCausalLM", "Inkling2ForCausalLM", "Inkling2ForConditionalGeneration", "Inkling2LoopForCausalLM",
    "Inkling2LoopForConditionalGeneration", "CpmAntForCausalLM", "ReformerModelWithLMHead",
)  # fmt: skip
"""Classes that mix several states between the last block and the final norm."""

LISTS = ("layers", "h", "blocks", "layer", "decoder.layers", "encoder.layer", "encoder.layers", "model.layers")
"""Names of lists of decoder blocks, seen from a model's body."""

NOT_CAUSAL = {
    "DiffusionGemmaForBlockDiffusion": "fills in blocks of tokens together",
    "Florence2ForConditionalGeneration": "encoder-decoder",
    "Gemma4AssistantForCausalLM": "shared_kv_states",
    "Gemma4UnifiedAssistantForCausalLM": "shared_kv_states",
    "MusicgenForCausalLM": "4 heads",
    "MusicgenMelodyForCausalLM": "4 heads",
    "PI0ForConditionalGeneration": "no language-model head",
    "PPFormulaNetForConditionalGeneration": "encoder-decoder",
    "Pix2StructForConditionalGeneration": "encoder-decoder",
    "T5Gemma2ForConditionalGeneration": "encoder-decoder",
    "UdopForConditionalGeneration": "encoder-decoder",
    "VisionEncoderDecoderModel": "encoder-decoder",
}
"""No causal language models over text, and what the refusal says: encoder-decoders, denoisers, actions, codebooks of sound, and draft models themselves."""
REFUSED = {
    "BltForCausalLM": "no one list of decoder blocks",
    "DoryForCausalLM": "DoryLMHead",
    "Gemma3ForConditionalGeneration-shieldgemma2": "are not in the files",
    "HrmTextForCausalLM": "no one list of decoder blocks",
    "IdeficsForVisionText2Text": "IdeficsDecoupledLinear",
    "ProphetNetForCausalLM": "the logit rule of ProphetNetForCausalLM could not be read",
    "XLMWithLMHeadModel": "no one list of decoder blocks",
}
"""Causal language models that are refused, and what the refusal says."""
LIBRARIES = {"Gemma3nForConditionalGeneration": "timm", "InklingForConditionalGeneration": "scipy"}
"""Classes that are not built without a library which is none of Draftsmith's."""
