"""Probabilistic programs: distrax, FlowJAX, TensorFlow Probability on JAX, NumPyro, BlackJAX, GPJax, tinygp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from corpus.registry import Case, normal, program, tokens, training


@program(
    "distrax",
    "train",
    "fit",
    small=dict(batch=32, width=16, hidden=64),
    full=dict(batch=65536, width=256, hidden=4096),
)
def distrax_flow(batch: int, width: int, hidden: int) -> Case:
    """A normalizing flow of distrax: masked affine couplings conditioned by networks; Adam."""
    import distrax

    mask = jnp.arange(width) % 2 == 0

    def density(params: Any) -> Any:
        layers = []
        for n, layer in enumerate(params):

            def conditioner(x: jax.Array, layer: Any = layer) -> jax.Array:
                return jnp.tanh(x @ layer["up"]) @ layer["down"]

            def bijector(parameters: jax.Array) -> Any:
                shift, scale = jnp.split(parameters, 2, -1)
                return distrax.ScalarAffine(shift=shift, log_scale=jnp.tanh(scale))

            layers.append(distrax.MaskedCoupling(mask if n % 2 else ~mask, conditioner, bijector))
        base = distrax.MultivariateNormalDiag(jnp.zeros(width), jnp.ones(width))
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers)))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return -jnp.mean(density(params).log_prob(x))

    def params() -> Any:
        return [
            {"up": 0.1 * normal(width, hidden, seed=n)(), "down": 0.1 * normal(hidden, 2 * width, seed=n + 9)()}
            for n in range(4)
        ]

    return training(loss, optax.adam(1e-3), params, normal(batch, width))


@program(
    "flowjax",
    "train",
    "fit",
    small=dict(batch=32, width=8, hidden=32, layers=2),
    full=dict(batch=65536, width=64, hidden=1024, layers=8),
)
def flowjax_autoregressive(batch: int, width: int, hidden: int, layers: int) -> Case:
    """A masked autoregressive flow of FlowJAX (Equinox modules, layers scanned), maximum likelihood; Adam."""
    import equinox as eqx
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow
    from paramax import unwrap

    def create() -> Any:
        return masked_autoregressive_flow(
            jax.random.key(0), base_dist=Normal(jnp.zeros(width)), flow_layers=layers, nn_width=hidden
        )

    static = eqx.partition(create(), eqx.is_array)[1]

    def loss(params: Any, rest: Any, x: jax.Array) -> jax.Array:
        return -jnp.mean(unwrap(eqx.combine(params, rest, static)).log_prob(x))

    def params() -> Any:
        return eqx.filter(create(), eqx.is_inexact_array)

    def rest() -> Any:
        return eqx.filter(eqx.filter(create(), eqx.is_array), eqx.is_inexact_array, inverse=True)

    return training(loss, optax.adam(1e-3), params, rest, normal(batch, width))


@program(
    "tfp-nightly",
    "infer",
    "fit",
    small=dict(chains=16, rows=64, width=16, steps=2),
    full=dict(chains=1024, rows=65536, width=512, steps=4),
)
def tfp_hmc(chains: int, rows: int, width: int, steps: int) -> Case:
    """Hamiltonian Monte Carlo of TensorFlow Probability on JAX: chains of a logistic regression."""
    from tensorflow_probability.substrates import jax as tfp

    def sample(key: jax.Array, start: jax.Array, features: jax.Array, labels: jax.Array) -> jax.Array:
        def log_density(weights: jax.Array) -> jax.Array:
            logits = jnp.einsum("nd,cd->cn", features, weights)
            likelihood = tfp.distributions.Bernoulli(logits=logits).log_prob(labels).sum(-1)
            return likelihood + tfp.distributions.Normal(0.0, 1.0).log_prob(weights).sum(-1)

        kernel = tfp.mcmc.HamiltonianMonteCarlo(log_density, step_size=1e-3, num_leapfrog_steps=3)
        return tfp.mcmc.sample_chain(steps, start, kernel=kernel, trace_fn=None, seed=key)

    def make() -> tuple[Any, ...]:
        data = normal(rows, width)(), tokens(rows, below=2)()
        return jax.random.key(0), 0.1 * normal(chains, width, seed=3)(), *data

    return Case(sample, make)


@program(
    "numpyro",
    "train",
    "test",
    small=dict(rows=256, width=16, groups=8),
    full=dict(rows=1048576, width=512, groups=4096),
)
def numpyro_variational(rows: int, width: int, groups: int) -> Case:
    """Stochastic variational inference of NumPyro: a hierarchical regression, mean-field guide; Adam."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(features: jax.Array, group: jax.Array, outcome: jax.Array) -> None:
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([width]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        effects = numpyro.sample("effects", dist.Normal(0, 1).expand([groups]).to_event(1))
        with numpyro.plate("rows", rows):
            numpyro.sample("outcome", dist.Bernoulli(logits=features @ weights + scale * effects[group]), obs=outcome)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-2), Trace_ELBO())

    def data() -> tuple[Any, ...]:
        return normal(rows, width)(), tokens(rows, below=groups)(), tokens(rows, below=2, seed=4)()

    def step(state: Any, features: jax.Array, group: jax.Array, outcome: jax.Array) -> Any:
        return svi.update(state, features, group, outcome)

    return Case(step, lambda: (svi.init(jax.random.key(0), *data()), *data()), donate=(0,))


@program(
    "blackjax",
    "infer",
    "fit",
    small=dict(chains=8, rows=64, width=16),
    full=dict(chains=1024, rows=65536, width=512),
)
def blackjax_nuts(chains: int, rows: int, width: int) -> Case:
    """A step of NUTS of BlackJAX for many chains: nested while loops under vmap."""
    import blackjax

    def step(key: jax.Array, positions: jax.Array, features: jax.Array, labels: jax.Array) -> jax.Array:
        def log_density(weights: jax.Array) -> jax.Array:
            return -jnp.logaddexp(0, -labels * (features @ weights)).sum() - 0.5 * jnp.sum(weights**2)

        sampler = blackjax.nuts(log_density, 1e-2, jnp.ones(width), max_num_doublings=4)

        def move(key: jax.Array, position: jax.Array) -> jax.Array:
            return sampler.step(key, sampler.init(position))[0].position

        return jax.vmap(move)(jax.random.split(key, chains), positions)

    def make() -> tuple[Any, ...]:
        data = normal(rows, width)(), 2.0 * tokens(rows, below=2)() - 1
        return jax.random.key(0), 0.1 * normal(chains, width, seed=3)(), *data

    return Case(step, make)


@program("gpjax", "train", "fit", small=dict(points=64, width=4), full=dict(points=8192, width=16))
def gpjax_regression(points: int, width: int) -> Case:
    """The marginal likelihood of a Gaussian process of GPJax (Cholesky) and its gradient; Adam."""
    import equinox as eqx
    import gpjax as gpx
    from paramax import unwrap

    def create() -> Any:
        prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Constant(), kernel=gpx.kernels.RBF())
        return prior * gpx.likelihoods.Gaussian()

    static = eqx.partition(create(), eqx.is_inexact_array)[1]

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        model = unwrap(eqx.combine(params, static))
        return -gpx.objectives.conjugate_mll(model, gpx.Dataset(X=x, y=y))

    def params() -> Any:
        return eqx.filter(create(), eqx.is_inexact_array)

    return training(loss, optax.adam(1e-2), params, normal(points, width), normal(points, 1, seed=2))


@program("tinygp", "infer", "test", small=dict(points=64, tests=32), full=dict(points=8192, tests=4096))
def tinygp_predict(points: int, tests: int) -> Case:
    """The mean and the variance of a conditioned Gaussian process of tinygp at new points."""
    import tinygp

    def predict(params: Any, x: jax.Array, y: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        kernel = params["amplitude"] * tinygp.kernels.ExpSquared(params["scale"])
        process = tinygp.GaussianProcess(kernel, x, diag=params["noise"]).condition(y, new).gp
        return process.loc, process.variance

    def make() -> tuple[Any, ...]:
        params = {"amplitude": jnp.float32(1.0), "scale": jnp.float32(2.0), "noise": jnp.float32(0.1)}
        return params, normal(points, 3)(), normal(points, seed=2)(), normal(tests, 3, seed=3)()

    return Case(predict, make)
