"""Simulations: Brax, MuJoCo XLA, JAX MD, JAX-CFD, Dinosaur, Jaxley; and equivariant networks of e3nn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from corpus.registry import Case, normal, program, tokens, training


@program("brax", "infer", "test", small=dict(batch=16, steps=1), full=dict(batch=16384, steps=4))
def brax_rollout(batch: int, steps: int) -> Case:
    """Brax's Hopper (positional pipeline) under vmap: resets and steps with random actions."""
    from brax import envs

    env = envs.get_environment("hopper", backend="positional")

    def rollout(keys: jax.Array, actions: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jax.vmap(env.reset)(keys)

        def step(state: Any, action: jax.Array) -> Any:
            state = jax.vmap(env.step)(state, action)
            return state, state.reward

        state, rewards = jax.lax.scan(step, state, actions)
        return state.obs, rewards

    def make() -> tuple[Any, ...]:
        return jax.random.split(jax.random.key(0), batch), 0.1 * normal(steps, batch, env.action_size)()

    return Case(rollout, make)


@program(
    "brax",
    "train",
    "fit",
    small=dict(batch=16, length=8, hidden=64),
    full=dict(batch=8192, length=32, hidden=1024),
)
def brax_ppo(batch: int, length: int, hidden: int) -> Case:
    """Brax's PPO loss (generalized advantages, tanh-normal policy) and its networks, Adam."""
    from brax.training import types
    from brax.training.agents.ppo import losses, networks

    network = networks.make_ppo_networks(
        27, 8, policy_hidden_layer_sizes=(hidden,) * 3, value_hidden_layer_sizes=(hidden,) * 3
    )

    def loss(params: Any, data: Any, key: jax.Array) -> jax.Array:
        return losses.compute_ppo_loss(params, None, data, key, network)[0]

    def params() -> Any:
        first, second = jax.random.split(jax.random.key(0))
        return losses.PPONetworkParams(
            policy=network.policy_network.init(first), value=network.value_network.init(second)
        )

    def data() -> Any:
        return types.Transition(
            observation=normal(batch, length, 27)(),
            action=jnp.tanh(normal(batch, length, 8, seed=4)()),
            reward=normal(batch, length, seed=5)(),
            discount=jnp.ones((batch, length)),
            next_observation=normal(batch, length, 27, seed=6)(),
            extras={
                "state_extras": {"truncation": jnp.zeros((batch, length))},
                "policy_extras": {
                    "raw_action": normal(batch, length, 8, seed=4)(),
                    "distribution_params": 0.1 * normal(batch, length, 16, seed=9)(),
                    "log_prob": -8 + 0.1 * normal(batch, length, seed=7)(),
                },
            },
        )

    return training(loss, optax.adam(3e-4), params, data, lambda: jax.random.key(8))


_PENDULUM = """
<mujoco>
  <option timestep="0.01" iterations="2" ls_iterations="4"/>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body pos="0 0 1">
      <joint type="hinge" axis="0 1 0"/>
      <geom type="capsule" size=".05" fromto="0 0 0 .5 0 0"/>
      <body pos=".5 0 0">
        <joint type="hinge" axis="0 1 0"/>
        <geom type="capsule" size=".05" fromto="0 0 0 .5 0 0"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""


@program("mujoco-mjx", "infer", "test", small=dict(batch=16), full=dict(batch=65536))
def mjx_step(batch: int) -> Case:
    """One step of MuJoCo XLA for a batch of double pendulums over a plane, with contacts."""
    import mujoco
    from mujoco import mjx

    model = mjx.put_model(mujoco.MjModel.from_xml_string(_PENDULUM))

    def step(positions: jax.Array, velocities: jax.Array) -> Any:
        def one(position: jax.Array, velocity: jax.Array) -> Any:
            data = mjx.step(model, mjx.make_data(model).replace(qpos=position, qvel=velocity))
            return data.qpos, data.qvel

        return jax.vmap(one)(positions, velocities)

    return Case(step, lambda: (normal(batch, 2)(), normal(batch, 2, seed=2)()))


def _crystal(side: int) -> jax.Array:
    grid = jnp.arange(side, dtype=jnp.float32)
    return jnp.stack(jnp.meshgrid(grid, grid, grid), -1).reshape(-1, 3) * 1.2


@program("jax-md", "infer", "fit", small=dict(side=4, steps=2), full=dict(side=24, steps=10))
def jax_md_dynamics(side: int, steps: int) -> Case:
    """Molecular dynamics of JAX MD at constant energy: Lennard-Jones particles, all pairs, in a periodic box."""
    from jax_md import energy, simulate, space

    displacement, shift = space.periodic(side * 1.2)
    init, apply = simulate.nve(energy.lennard_jones_pair(displacement), shift, dt=1e-3)

    def run(state: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, state: apply(state), state)

    return Case(run, lambda: (init(jax.random.key(0), _crystal(side), kT=0.5),), donate=(0,))


@program(
    "jax-md",
    "train",
    "test",
    small=dict(side=2, batch=16, hidden=32),
    full=dict(side=4, batch=256, hidden=512),
)
def jax_md_potential(side: int, batch: int, hidden: int) -> Case:
    """A potential from pair features of JAX MD, trained on forces: second derivatives, Adam."""
    from jax_md import energy, space

    displacement, _ = space.periodic(side * 1.2)
    truth = energy.soft_sphere_pair(displacement, sigma=1.5)
    distance = space.map_product(space.metric(displacement))

    def potential(params: Any, positions: jax.Array) -> jax.Array:
        apart = distance(positions, positions)
        features = jnp.exp(-((apart[..., None] - jnp.linspace(0.5, 3, 16)) ** 2))
        hidden_layer = jnp.tanh(features.sum(1) @ params["w"] + params["b"])
        return jnp.sum(hidden_layer @ params["out"])

    def loss(params: Any, positions: jax.Array) -> jax.Array:
        forces = jax.vmap(jax.grad(lambda r: potential(params, r)))(positions)
        return jnp.mean((forces - jax.vmap(jax.grad(truth))(positions)) ** 2)

    def params() -> Any:
        return {"w": 0.2 * normal(16, hidden)(), "b": jnp.zeros(hidden), "out": 0.1 * normal(hidden, 1, seed=2)()}

    def positions() -> jax.Array:
        return _crystal(side) + 0.1 * normal(batch, side**3, 3, seed=3)()

    return training(loss, optax.adam(1e-3), params, positions)


@program("jax-cfd", "infer", "test", small=dict(size=32, steps=2), full=dict(size=2048, steps=10))
def jax_cfd_navier_stokes(size: int, steps: int) -> Case:
    """Two-dimensional Navier-Stokes of JAX-CFD: finite volumes, pressure by Fourier transforms."""
    import jax_cfd.base as cfd

    grid = cfd.grids.Grid((size, size), domain=((0, 2 * jnp.pi), (0, 2 * jnp.pi)))
    step = cfd.equations.semi_implicit_navier_stokes(density=1.0, viscosity=1e-3, dt=1e-3, grid=grid)
    run = cfd.funcutils.repeated(step, steps)
    offsets = (1.0, 0.5), (0.5, 1.0)
    conditions = cfd.boundaries.periodic_boundary_conditions(2)

    def simulate(u: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        arrays = (cfd.grids.GridArray(x, offset, grid) for x, offset in zip((u, v), offsets, strict=True))
        out = run(tuple(cfd.grids.GridVariable(x, conditions) for x in arrays))
        return out[0].data, out[1].data

    def make() -> tuple[Any, ...]:
        x = jnp.linspace(0, 2 * jnp.pi, size, endpoint=False)
        u, v = -jnp.cos(x)[:, None] * jnp.sin(x), jnp.sin(x)[:, None] * jnp.cos(x)
        return u + 0.01 * normal(size, size)(), v + 0.01 * normal(size, size, seed=2)()

    return Case(simulate, make)


@program("dinosaur", "infer", "test", small=dict(levels=8, wavenumber=21), full=dict(levels=32, wavenumber=170))
def dinosaur_transform(levels: int, wavenumber: int) -> Case:
    """Dinosaur's spherical harmonics: fields to modes, Laplacian, advection on the grid, and back."""
    from dinosaur import spherical_harmonic

    grid = spherical_harmonic.Grid.with_wavenumbers(wavenumber + 1)

    def step(vorticity: jax.Array, divergence: jax.Array, temperature: jax.Array) -> jax.Array:
        u, v = spherical_harmonic.vor_div_to_uv_nodal(grid, vorticity, divergence)
        flux = grid.to_modal(u * grid.to_nodal(temperature)), grid.to_modal(v * grid.to_nodal(temperature))
        return temperature - 0.1 * grid.div_cos_lat(flux) + 0.1 * grid.laplacian(temperature)

    def make() -> tuple[Any, ...]:
        shape = levels, *grid.modal_shape
        return tuple(normal(*shape, seed=n)() * grid.mask for n in range(3))

    return Case(step, make)


@program(
    "e3nn-jax",
    "train",
    "fit",
    small=dict(atoms=64, edges=256, channels=8),
    full=dict(atoms=16384, edges=262144, channels=64),
)
def e3nn_message_passing(atoms: int, edges: int, channels: int) -> Case:
    """Equivariant message passing of e3nn: spherical harmonics, tensor products, segment sums; Adam."""
    import e3nn_jax as e3nn

    irreps = e3nn.Irreps(f"{channels}x0e + {channels}x1o + {channels}x2e")
    kept = ["0e", "1o", "2e"]
    linear = e3nn.FunctionalLinear(e3nn.tensor_product(irreps, "0e + 1o + 2e", filter_ir_out=kept), irreps)

    def loss(params: Any, positions: jax.Array, features: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        apart = e3nn.IrrepsArray("1o", positions[target] - positions[source] + 1e-3)
        harmonics = e3nn.spherical_harmonics([0, 1, 2], apart, normalize=True)
        x = e3nn.IrrepsArray(irreps, features)
        for weights in params:
            message = e3nn.tensor_product(x[source], harmonics, filter_ir_out=kept)
            message = jax.vmap(linear, in_axes=(None, 0))(weights, message)
            x = x + e3nn.scatter_sum(message, dst=target, output_size=atoms) / 8
        return jnp.mean(x.array**2)

    def params() -> Any:
        return [[0.1 * normal(*i.path_shape)() for i in linear.instructions] for _ in range(2)]

    data = normal(atoms, 3), normal(atoms, irreps.dim, seed=2)
    ends = tokens(edges, below=atoms), tokens(edges, below=atoms, seed=6)
    return training(loss, optax.adam(1e-3), params, *data, *ends)


@program("jaxley", "train", "test", small=dict(cells=4, steps=10), full=dict(cells=1024, steps=200))
def jaxley_neurons(cells: int, steps: int) -> Case:
    """Biophysical neurons of Jaxley (Hodgkin-Huxley, implicit Euler) under vmap, and their gradient."""
    import jaxley
    from jaxley.channels import HH

    compartment = jaxley.Compartment()
    branch = jaxley.Branch(compartment, ncomp=4)
    cell = jaxley.Cell(branch, parents=[-1, 0, 0])
    cell.insert(HH())
    cell.branch(1).loc(1.0).record(verbose=False)
    cell.make_trainable("HH_gNa", verbose=False)
    place = cell.branch(0).loc(0.0)

    def voltage(params: Any, current: jax.Array) -> jax.Array:
        stimulus = place.data_stimulate(current, None)
        return jaxley.integrate(cell, params=params, data_stimuli=stimulus, t_max=steps * 0.025)

    def loss(params: Any, currents: jax.Array, targets: jax.Array) -> jax.Array:
        found = jax.vmap(voltage, in_axes=(None, 0))(params, currents)
        return jnp.mean((found[..., : targets.shape[-1]] - targets) ** 2)

    def make() -> tuple[Any, ...]:
        currents = 0.1 * jnp.abs(normal(cells, steps)())
        return cell.get_parameters(), currents, -70 + normal(cells, 1, steps, seed=2)()

    return Case(jax.value_and_grad(loss), make)
