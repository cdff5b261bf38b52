"""Continuous batching: tasks, sampling, the step loop and the Python face of inference."""

from astrai_triton.engine.engine import InferenceEngine
from astrai_triton.engine.params import SamplingParams
from astrai_triton.engine.result import FinishReason, GenerateResult, TaskHandle, TokenEvent, TokenLogprob
from astrai_triton.engine.sampling import (
    BaseSamplingStrategy,
    SamplingPipeline,
    TemperatureStrategy,
    TopKStrategy,
    TopPStrategy,
    sample,
)
from astrai_triton.engine.scheduler import InferenceScheduler
from astrai_triton.engine.stats import StepHistogram
from astrai_triton.engine.stops import StopMatcher

__all__ = [
    "BaseSamplingStrategy",
    "FinishReason",
    "GenerateResult",
    "InferenceEngine",
    "InferenceScheduler",
    "SamplingParams",
    "SamplingPipeline",
    "StepHistogram",
    "StopMatcher",
    "TaskHandle",
    "TemperatureStrategy",
    "TokenEvent",
    "TokenLogprob",
    "TopKStrategy",
    "TopPStrategy",
    "sample",
]
