"""Probabilistic programs, samplers, planning, optimal transport: NumPyro, BlackJAX, mctx, tinygp, OTT."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .program import Program, Step, apart, exactly, no_conflict, one_color, random_key, shape, tokens


def hierarchical_regression() -> tuple[Step, tuple[Any, ...]]:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import potential_energy

    def model(features: jax.Array, group: jax.Array, outcome: jax.Array) -> None:
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(256), 1.0).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        effects = numpyro.sample("effects", dist.Normal(jnp.zeros(32), scale).to_event(1))
        with numpyro.plate("data", features.shape[0]):
            logits = features @ weights + effects[group]
            numpyro.sample("outcome", dist.Bernoulli(logits=logits), obs=outcome)

    def energy(params: Any, features: jax.Array, group: jax.Array, outcome: jax.Array) -> jax.Array:
        return potential_energy(model, (features, group, outcome), {}, params)

    params = {"weights": shape(256), "scale": shape(), "effects": shape(32)}
    return jax.value_and_grad(energy), (params, shape(8192, 256), tokens(8192), tokens(8192))


def no_u_turn_sampler() -> tuple[Step, tuple[Any, ...]]:
    import blackjax

    def step(key: jax.Array, positions: jax.Array, features: jax.Array, labels: jax.Array) -> jax.Array:
        def log_density(weights: jax.Array) -> jax.Array:
            return -jnp.logaddexp(0, -labels * (features @ weights)).sum() - 0.5 * jnp.sum(weights**2)

        sampler = blackjax.nuts(log_density, 1e-2, jnp.ones(256))

        def move(key: jax.Array, position: jax.Array) -> jax.Array:
            return sampler.step(key, sampler.init(position))[0].position

        return jax.vmap(move)(jax.random.split(key, 16), positions)

    return step, (random_key(), shape(16, 256), shape(512, 256), shape(512))


def tree_search() -> tuple[Step, tuple[Any, ...]]:
    import mctx

    def plan(params: Any, key: jax.Array, observation: jax.Array) -> jax.Array:
        def recurrent(params: Any, key: jax.Array, action: jax.Array, state: jax.Array) -> Any:
            state = jax.nn.relu(state @ params["transition"] + jax.nn.one_hot(action, 18) @ params["action"])
            return _heads(params, state), state

        def _heads(params: Any, state: jax.Array) -> Any:
            return mctx.RecurrentFnOutput(
                reward=(state @ params["reward"])[:, 0],
                discount=jnp.ones(state.shape[0]),
                prior_logits=state @ params["policy"],
                value=(state @ params["value"])[:, 0],
            )

        state = jax.nn.relu(observation @ params["encode"])
        out = _heads(params, state)
        root = mctx.RootFnOutput(prior_logits=out.prior_logits, value=out.value, embedding=state)
        return mctx.gumbel_muzero_policy(params, key, root, recurrent, num_simulations=32).action_weights

    params = {
        "encode": shape(640, 256),
        "transition": shape(256, 256),
        "action": shape(18, 256),
        "reward": shape(256, 1),
        "policy": shape(256, 18),
        "value": shape(256, 1),
    }
    return plan, (params, random_key(), shape(128, 640))


def gaussian_process() -> tuple[Step, tuple[Any, ...]]:
    import tinygp

    def loss(params: Any, points: jax.Array, values: jax.Array) -> jax.Array:
        kernel = params["amplitude"] * tinygp.kernels.ExpSquared(params["scale"])
        return -tinygp.GaussianProcess(kernel, points, diag=params["noise"]).log_probability(values)

    params = {"amplitude": shape(), "scale": shape(), "noise": shape()}
    return jax.value_and_grad(loss), (params, shape(512, 8), shape(512))


def sinkhorn() -> tuple[Step, tuple[Any, ...]]:
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    def cost(x: jax.Array, y: jax.Array) -> jax.Array:
        problem = linear_problem.LinearProblem(pointcloud.PointCloud(x, y, epsilon=0.1))
        return sinkhorn.Sinkhorn(max_iterations=100)(problem).reg_ot_cost

    return jax.value_and_grad(cost), (shape(256, 64), shape(512, 64))


PROGRAMS = (
    Program(
        "numpyro-regression",
        "numpyro",
        "the potential energy of a hierarchical logistic regression, and its gradient",
        hierarchical_regression,
        (
            exactly("features[0]", "group[0]", "outcome[0]"),
            exactly("params/weights[0]", "features[1]"),
            exactly("params/effects[0]"),
            no_conflict(),
        ),
    ),
    Program(
        "blackjax-nuts",
        "blackjax",
        "a step of NUTS for sixteen chains: nested while loops under vmap",
        no_u_turn_sampler,
        (
            exactly("positions[0]"),
            exactly("positions[1]", "features[1]"),
            exactly("features[0]", "labels[0]"),
            no_conflict(),
        ),
    ),
    Program(
        "mctx-gumbel-muzero",
        "mctx",
        "a batched tree search with a learned model",
        tree_search,
        (
            exactly("observation[0]"),
            exactly("observation[1]", "params/encode[0]"),
            one_color("params/encode[1]", "params/transition[0]", "params/transition[1]", "params/policy[0]"),
            apart("observation[0]", "params/encode[1]", "params/action[0]", "params/policy[1]"),
        ),
    ),
    Program(
        "tinygp-likelihood",
        "tinygp",
        "the marginal likelihood of a Gaussian process (Cholesky), and its gradient",
        gaussian_process,
        (exactly("points[0]", "values[0]"), exactly("points[1]")),
        opaque={"platform_index": "a scalar without dimensions: which platform's branch runs"},
    ),
    Program(
        "ott-sinkhorn",
        "ott-jax",
        "entropic optimal transport between point clouds, and its gradient",
        sinkhorn,
        (exactly("x[0]"), exactly("y[0]"), exactly("x[1]", "y[1]"), no_conflict()),
    ),
)
