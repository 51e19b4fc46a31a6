cd /tmp/prior
for s in 701 702 703 704 705; do
echo "with $s env.reward=success run.env_steps=15360 algo.imitation={data:\ /tmp/prior/t/demos/toy,\ episodes:\ 10,\ weight:\ 0.5,\ decay:\ 0.9}"
echo "without $s env.reward=success run.env_steps=19456"
done | xargs -P 4 -L 1 /tmp/prior/pm.sh
