"""What simulators on MuJoCo and robosuite share: LIBERO and robosuite itself."""
