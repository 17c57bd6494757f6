"""The table of optimisations, in the order in which they are put in place."""

from __future__ import annotations

from darkroom.sample.optimisations import attention, compiled, offload, precision, smaller, steps, streamed
from darkroom.sample.optimisations.optimisation import (
    LOSSLESS,
    LOSSY,
    OTHER,
    STATED,
    Optimisation,
    needs_cuda,
)
from darkroom.sample.optimisations.tiny_vae import tiny_vae

ONE_TYPE = "weights have one type"
ONE_OFFLOAD = "weights wait in one way"
OWN_CODE = "it makes one piece of code of the whole U-Net"
FROM_FILES = "weights are called as they lie in the files"
MOVING = "weights move between calls"
HOOKS = "the hooks that move weights cannot take quantised ones apart"
NO_PYTHON = "it leaves no Python to spare"
BY_PARTS = "feature_cache calls the U-Net's layers one by one"

OPTIMISATIONS: dict[str, Optimisation] = {
    one.name: one
    for one in (
        Optimisation(
            "lcm", OTHER, "few steps with LCM weights or an LCM adapter", steps.lcm,
            excludes={
                "guidance_interval": "an LCM has its guidance built in",
                "feature_cache": "its few steps have little in common",
            },
            argument="FILE", needs_unet=True,
        ),
        Optimisation(
            "tf32", STATED, "float32 products rounded to 10 bits", precision.tf32, precision.lacks_tf32
        ),
        Optimisation(
            "fp16", STATED, "weights and activations in float16", precision.fp16, precision.lacks_fp16,
            excludes={"tf32": "TF32 is for float32"},
        ),
        Optimisation(
            "bf16", STATED, "weights and activations in bfloat16", precision.bf16, precision.lacks_bf16,
            excludes={"fp16": ONE_TYPE, "tf32": "TF32 is for float32"},
        ),
        Optimisation(
            "channels_last", LOSSLESS, "channels innermost, for tensor cores", precision.channels_last
        ),
        Optimisation(
            "fused_attention", LOSSLESS, "attention in one kernel (SDPA; xformers where asked)",
            attention.fused_attention, argument="sdpa|xformers",
        ),
        Optimisation(
            "unfused_attention", LOSSLESS, "scores, softmax, sum one by one: slower, to compare with",
            attention.unfused_attention,
            excludes={"fused_attention": "it is the other one"}, needs_unet=True,
        ),
        Optimisation(
            "fused_qkv", LOSSLESS, "query, key and value in one product", attention.fused_qkv,
            excludes={"unfused_attention": "fused projections come with fused attention"}, needs_unet=True,
        ),
        Optimisation(
            "attention_slicing", LOSSLESS, "a few heads at a time: less memory, slower",
            attention.attention_slicing,
            excludes={
                "fused_attention": "slices replace the fused kernel, and are slower and larger than it",
                "unfused_attention": "it is another attention",
                "fused_qkv": "fused projections come with fused attention",
            },
            argument="auto|max|HEADS", needs_unet=True,
        ),
        Optimisation(
            "lean", LOSSLESS, "attention without checks at each call; a text's keys and values made once",
            attention.lean,
            excludes={
                "unfused_attention": "it is fused attention",
                "attention_slicing": "it is fused attention",
            },
            needs_unet=True,
        ),
        Optimisation("vae_slicing", LOSSLESS, "one picture at a time through the VAE", smaller.vae_slicing),
        Optimisation(
            "vae_tiling", LOSSY, "large pictures through the VAE in blended tiles", smaller.vae_tiling,
            argument="PIXELS",
        ),
        Optimisation(
            "tiny_vae", LOSSY, "a small decoder in the VAE's place", tiny_vae,
            excludes={"vae_tiling": "the tiny decoder takes whole pictures in little memory"},
            argument="FOLDER",
        ),
        Optimisation(
            "int8", LOSSY, "large linear layers in 8-bit integers", smaller.int8, smaller.lacks_int8,
            argument="dynamic|weights",
        ),
        Optimisation(
            "fp8", LOSSY, "large linear layers in 8-bit floating point", smaller.fp8, smaller.lacks_fp8,
            excludes={"int8": ONE_TYPE}, argument="dynamic|weights",
        ),
        Optimisation(
            "offload_model", LOSSLESS, "text encoders, U-Net, VAE on the card in turn", offload.offload_model,
            needs_cuda("offloading is from a CUDA card to main memory"),
        ),
        Optimisation(
            "offload_sequential", LOSSLESS, "each layer on the card for its own call only: slow",
            offload.offload_sequential, needs_cuda("offloading is from a CUDA card to main memory"),
            excludes={"offload_model": ONE_OFFLOAD, "int8": HOOKS, "fp8": HOOKS},
        ),
        Optimisation(
            "offload_group", LOSSLESS, "layers copied to the card while the one before computes",
            offload.offload_group, needs_cuda("offloading is from a CUDA card to main memory"),
            excludes={
                "offload_model": ONE_OFFLOAD, "offload_sequential": ONE_OFFLOAD, "int8": HOOKS, "fp8": HOOKS,
            },
        ),
        Optimisation(
            "offload_mmap", LOSSLESS, "each layer read from its file for its own call",
            streamed.offload_mmap, streamed.lacks_mmap,
            excludes={
                "int8": HOOKS, "fp8": HOOKS, "channels_last": FROM_FILES, "fused_qkv": FROM_FILES,
                "lcm": "merged weights lie in no file", "autocast": ONE_TYPE,
            },
        ),
        Optimisation(
            "guidance_interval", LOSSY, "guidance at middling noise levels only; can improve pictures",
            steps.guidance_interval, argument="LOW-HIGH",
        ),
        Optimisation(
            "compile", LOSSLESS, "the U-Net by torch.compile, a graph a size", compiled.compile_whole,
            compiled.lacks_compiler,
            excludes={
                "lean": NO_PYTHON, "offload_sequential": MOVING, "offload_group": MOVING,
                "offload_mmap": MOVING,
            },
            argument="MODE",
        ),
        Optimisation(
            "compile_regional", LOSSLESS, "repeated blocks by torch.compile: short to compile",
            compiled.compile_regional, compiled.lacks_compiler,
            excludes={
                "compile": OWN_CODE, "lean": NO_PYTHON, "offload_sequential": MOVING, "offload_group": MOVING,
                "offload_mmap": MOVING,
            },
            argument="MODE",
        ),
        Optimisation(
            "feature_cache", LOSSY, "deep features reused between steps (DeepCache)", steps.feature_cache,
            excludes={"compile": BY_PARTS}, argument="N", needs_unet=True,
        ),
        Optimisation(
            "cuda_graphs", LOSSLESS, "the U-Net call captured and replayed", compiled.cuda_graphs,
            needs_cuda("CUDA graphs are of CUDA"),
            excludes={
                "offload_model": MOVING, "offload_sequential": MOVING, "offload_group": MOVING,
                "feature_cache": BY_PARTS, "lean": NO_PYTHON,
            },
        ),
        Optimisation(
            "trace", LOSSLESS, "torch.jit.trace in the process; deprecated in torch, to compare with",
            compiled.trace,
            excludes={
                "compile": OWN_CODE, "compile_regional": OWN_CODE, "cuda_graphs": OWN_CODE,
                "feature_cache": BY_PARTS, "offload_sequential": MOVING, "offload_group": MOVING,
                "lean": NO_PYTHON, "offload_mmap": MOVING,
            },
        ),
        Optimisation(
            "autocast", STATED, "casts at every operation: to show what that costs", precision.autocast,
            excludes={
                "tf32": "TF32 is for float32", "cuda_graphs": "autocast's casts cannot be captured",
                "trace": "the trace would hold autocast's casts", "int8": ONE_TYPE, "fp8": ONE_TYPE,
            },
            argument="bf16|fp16",
        ),
    )
}  # fmt: skip
