#!lua
-- ARGV: holder, nonce, lease_us (duration).
local head = read_head()
if not head then return {'not_found'} end
local now = clock_us()
local is_taken = head.holder ~= '' and tonumber(head.lease_us) > now
-- The same nonce is this call again, after its answer was lost.
if is_taken and head.lease_nonce == ARGV[2] then return with_tail(head, 'ok') end
if is_taken then return {'busy', whole(tonumber(head.lease_us) - now)} end
local damage = log_damage(head)
if damage then return {'log_corrupt', redis.call('HGETALL', head_key), damage} end
local ids, tail_damage = read_tail(head)
if not ids then return {'log_corrupt', redis.call('HGETALL', head_key), tail_damage} end
write_head(head, {
  holder = ARGV[1], lease_nonce = ARGV[2], lease_us = whole(now + tonumber(ARGV[3])), fence = whole(head.fence + 1),
})
return {'ok', redis.call('HGETALL', head_key), ids, read_tail_marks(head)}
