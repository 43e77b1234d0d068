"""How far a Triton kernel may be from kernels/reference.py: one table, with the reason for each figure."""

import torch

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

# (kernel, dtype) -> absolute tolerance; inputs have unit variance and are given to both sides in that dtype.
TOLERANCE = {
    # Two products and a sum, then the result's own rounding: half a unit in the last place below 8.
    ("rope_store", FP32): 2e-6,
    ("rope_store", FP16): 4e-3,
    ("rope_store", BF16): 3e-2,
    # log2 D sums of butterflies, then the rounding as above.
    ("rotate", FP32): 1e-5,
    ("rotate", FP16): 4e-3,
    ("rotate", BF16): 3e-2,
    # Shares of codes that differ: a residual that fp32 puts on the other side of a threshold than float64 does, or of
    # a mean that fp32 rounds to the next step. Inputs are widened exactly, so their type adds nothing.
    ("seal", FP32): 5e-3,
    ("seal", FP16): 5e-3,
    ("seal", BF16): 5e-3,
    # Logits up to about 30. Half types round the rotated query, and D products of it add up.
    ("score", FP32): 1e-4,
    ("score", FP16): 1e-2,
    ("score", BF16): 8e-2,
    # Bounds are exact in fp32 whatever the query's type: fp32 sums of up to about 100 against float64.
    ("score_bounds", FP32): 2e-4,
    ("score_bounds", FP16): 2e-4,
    ("score_bounds", BF16): 2e-4,
    # fp32 in and out whatever the model's type is: a log-sum-exp and a maximum.
    ("group_scores", FP32): 1e-4,
    # Choices, plans and copies are exact.
    ("top_blocks", FP32): 0.0,
    ("copy_plan", FP32): 0.0,
    ("gather", FP32): 0.0,
    ("gather", FP16): 0.0,
    ("gather", BF16): 0.0,
    # fp32 sums; half types round the softmax weights and the result.
    ("attention", FP32): 2e-5,
    ("attention", FP16): 4e-3,
    ("attention", BF16): 3e-2,
    # The same, and mean values of up to about 8 rounded to the type.
    ("tail", FP32): 2e-5,
    ("tail", FP16): 8e-3,
    ("tail", BF16): 6e-2,
    # fp32 sums of a few states, the result in its own type.
    ("merge_states", FP32): 1e-5,
    ("merge_states", FP16): 2e-3,
    ("merge_states", BF16): 2e-2,
    # Statistics in fp32, the result (up to about 16) in its own type; a residual is rounded before it is normalised.
    ("rms_norm", FP32): 1e-5,
    ("rms_norm", FP16): 1e-2,
    ("rms_norm", BF16): 7e-2,
    # An exponential and a quotient, the result (up to about 16) in its own type.
    ("silu_mul", FP32): 1e-5,
    ("silu_mul", FP16): 8e-3,
    ("silu_mul", BF16): 6e-2,
}
