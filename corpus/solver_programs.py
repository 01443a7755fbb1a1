"""Solvers and optimization: Diffrax, Lineax, Optimistix, JAXopt, OTT, jaxlie, optax; and images by dm-pix."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from corpus.registry import Case, normal, program, tokens, training


@program(
    "diffrax",
    "train",
    "test",
    small=dict(batch=16, width=8, hidden=32, times=8),
    full=dict(batch=8192, width=64, hidden=1024, times=16),
)
def diffrax_neural_ode(batch: int, width: int, hidden: int, times: int) -> Case:
    """A neural ODE of Diffrax: adaptive Tsit5 under vmap, recursive checkpointing; AdaBelief."""
    import diffrax
    import equinox as eqx

    def create() -> Any:
        return eqx.nn.MLP(width, width, hidden, 2, jax.nn.softplus, key=jax.random.key(0))

    static = eqx.partition(eqx.filter_eval_shape(create), lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]

    def loss(params: Any, series: jax.Array) -> jax.Array:
        field = eqx.combine(params, static)

        def solve(start: jax.Array) -> jax.Array:
            return diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: jnp.tanh(field(y))),
                diffrax.Tsit5(),
                t0=0.0,
                t1=1.0,
                dt0=0.1,
                y0=start,
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
                saveat=diffrax.SaveAt(ts=jnp.linspace(0, 1, times)),
                max_steps=64,
            ).ys

        return jnp.mean((jax.vmap(solve)(series[:, 0]) - series) ** 2)

    params = lambda: eqx.filter(create(), eqx.is_array)  # noqa: E731
    return training(loss, optax.adabelief(3e-3), params, normal(batch, times, width))


@program("diffrax", "infer", "fit", small=dict(batch=32, steps=8), full=dict(batch=1048576, steps=100))
def diffrax_lorenz(batch: int, steps: int) -> Case:
    """Lorenz systems with noise solved by Diffrax: Euler-Maruyama with Brownian motion under vmap."""
    import diffrax

    def simulate(starts: jax.Array, keys: jax.Array) -> jax.Array:
        def drift(t: Any, y: jax.Array, args: Any) -> jax.Array:
            return jnp.stack([10 * (y[1] - y[0]), y[0] * (28 - y[2]) - y[1], y[0] * y[1] - 8 / 3 * y[2]])

        def one(start: jax.Array, key: jax.Array) -> jax.Array:
            noise = diffrax.UnsafeBrownianPath(shape=(3,), key=key)
            terms = diffrax.MultiTerm(
                diffrax.ODETerm(drift), diffrax.ControlTerm(lambda t, y, args: 0.1 * jnp.eye(3), noise)
            )
            solution = diffrax.diffeqsolve(
                terms,
                diffrax.Euler(),
                0.0,
                steps * 0.001,
                0.001,
                start,
                adjoint=diffrax.DirectAdjoint(),
                max_steps=steps + 1,
            )
            return solution.ys[0]

        return jax.vmap(one)(starts, keys)

    return Case(simulate, lambda: (normal(batch, 3)(), jax.random.split(jax.random.key(0), batch)))


@program("lineax", "infer", "test", small=dict(batch=16, width=32), full=dict(batch=4096, width=1024))
def lineax_solves(batch: int, width: int) -> Case:
    """A batch of linear systems of Lineax: conjugate gradients, and a least-squares solution by QR."""
    import lineax

    def solve(matrices: jax.Array, vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
        def one(matrix: jax.Array, vector: jax.Array) -> tuple[jax.Array, jax.Array]:
            normal_matrix = matrix.T @ matrix / width + jnp.eye(width)
            positive = lineax.MatrixLinearOperator(normal_matrix, lineax.positive_semidefinite_tag)
            first = lineax.linear_solve(positive, vector, lineax.CG(rtol=1e-5, atol=1e-5)).value
            tall = lineax.MatrixLinearOperator(matrix[:, : width // 2])
            return first, lineax.linear_solve(tall, vector, lineax.QR()).value

        return jax.vmap(one)(matrices, vectors)

    return Case(solve, lambda: (normal(batch, width, width)(), normal(batch, width, seed=2)()))


@program("optimistix", "train", "test", small=dict(rows=128, width=16), full=dict(rows=262144, width=256))
def optimistix_fit(rows: int, width: int) -> Case:
    """Logistic least squares by Levenberg-Marquardt of Optimistix."""
    import optimistix

    def fit(weights: jax.Array, features: jax.Array, targets: jax.Array) -> jax.Array:
        def residuals(w: jax.Array, data: Any) -> jax.Array:
            return jax.nn.sigmoid(data[0] @ w) - data[1]

        solver = optimistix.LevenbergMarquardt(rtol=1e-3, atol=1e-3)
        found = optimistix.least_squares(residuals, solver, weights, (features, targets), max_steps=8, throw=False)
        return found.value

    def make() -> tuple[Any, ...]:
        return 0.1 * normal(width)(), normal(rows, width, seed=2)(), jax.nn.sigmoid(normal(rows, seed=3)())

    return Case(fit, make)


@program("jaxopt", "train", "test", small=dict(rows=128, width=16), full=dict(rows=262144, width=2048))
def jaxopt_lbfgs(rows: int, width: int) -> Case:
    """A step of L-BFGS of JAXopt with line search on a multiclass logistic regression."""
    import jaxopt

    solver = jaxopt.LBFGS(jaxopt.objective.multiclass_logreg, maxiter=10)

    def step(params: jax.Array, state: Any, features: jax.Array, labels: jax.Array) -> Any:
        return tuple(solver.update(params, state, (features, labels)))

    def make() -> tuple[Any, ...]:
        params, data = jnp.zeros((width, 10)), (normal(rows, width)(), tokens(rows, below=10)())
        return params, solver.init_state(params, data), *data

    return Case(step, make, donate=(0, 1))


@program(
    "ott-jax",
    "infer",
    "fit",
    small=dict(first=64, second=128, width=8),
    full=dict(first=16384, second=32768, width=64),
)
def ott_sinkhorn(first: int, second: int, width: int) -> Case:
    """Entropic optimal transport of OTT between point clouds: Sinkhorn's algorithm."""
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    def match(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        problem = linear_problem.LinearProblem(pointcloud.PointCloud(x, y, epsilon=0.5))
        out = sinkhorn.Sinkhorn(max_iterations=20)(problem)
        return out.reg_ot_cost, out.f

    return Case(match, lambda: (normal(first, width)(), normal(second, width, seed=2)()))


@program("jaxlie", "train", "fit", small=dict(poses=64, edges=256), full=dict(poses=65536, edges=1048576))
def jaxlie_pose_graph(poses: int, edges: int) -> Case:
    """Gradient descent on a pose graph of jaxlie: SE(3) compositions and logarithms under vmap."""
    import jaxlie

    def residual(tangents: jax.Array, measured: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        def one(a: jax.Array, b: jax.Array, m: jax.Array) -> jax.Array:
            between = jaxlie.SE3.exp(a).inverse() @ jaxlie.SE3.exp(b)
            return (jaxlie.SE3.exp(m).inverse() @ between).log()

        return jnp.sum(jax.vmap(one)(tangents[source], tangents[target], measured) ** 2)

    ends = tokens(edges, below=poses), tokens(edges, below=poses, seed=4)
    return training(
        residual, optax.sgd(1e-3), lambda: 0.3 * normal(poses, 6)(), lambda: 0.3 * normal(edges, 6, seed=2)(), *ends
    )


@program(
    "optax",
    "train",
    "fit",
    small=dict(width=64, hidden=128, batch=32),
    full=dict(width=4096, hidden=16384, batch=4096),
)
def optax_muon(width: int, hidden: int, batch: int) -> Case:
    """Muon of optax (orthogonalized momentum by Newton-Schulz) on a gated network."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        out = (jax.nn.silu(x @ params["gate"]) * (x @ params["up"])) @ params["down"] + params["bias"]
        return jnp.mean((out - y) ** 2)

    def params() -> Any:
        return {
            "gate": 0.1 * normal(width, hidden)(),
            "up": 0.1 * normal(width, hidden, seed=4)(),
            "down": 0.1 * normal(hidden, width, seed=5)(),
            "bias": jnp.zeros(width),
        }

    return training(loss, optax.contrib.muon(1e-3), params, normal(batch, width), normal(batch, width, seed=6))


@program("dm-pix", "infer", "test", small=dict(batch=16, image=32), full=dict(batch=1024, image=512))
def pix_augmentation(batch: int, image: int) -> Case:
    """Augmentation of images by dm-pix: flips, rotation, blur, colors, similarity to the original."""
    import dm_pix as pix

    def augment(images: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        def one(picture: jax.Array, key: jax.Array) -> jax.Array:
            first, second, third = jax.random.split(key, 3)
            out = pix.random_flip_left_right(first, picture)
            out = pix.rotate(out, jax.random.uniform(second, (), minval=-0.5, maxval=0.5))
            out = pix.gaussian_blur(out, 1.0, 5)
            return pix.random_brightness(third, pix.adjust_saturation(out, 1.3), 0.2)

        out = jax.vmap(one)(images, keys)
        return out, pix.ssim(images, jnp.clip(out, 0, 1))

    def make() -> tuple[Any, ...]:
        images = jax.random.uniform(jax.random.key(1), (batch, image, image, 3))
        return images, jax.random.split(jax.random.key(0), batch)

    return Case(augment, make)
