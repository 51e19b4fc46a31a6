"""LIBERO tasks on MuJoCo: states, images, stored initial states, experts."""
