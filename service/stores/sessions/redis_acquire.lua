#!lua
-- ARGV: holder, nonce, lease_us (duration), "created_us:version" whose log the caller has in its state ('' for none);
-- and of a turn that is about to begin: the arguments of begin_record. The answer then ends with its record, see
-- redis_turns.lua.
local head = read_head()
if not head then return {'not_found'} end
local now = clock_us()
local is_taken = head.holder ~= '' and tonumber(head.lease_us) > now
-- The same nonce is this call again, after its answer was lost.
local is_again = is_taken and head.lease_nonce == ARGV[2]
if is_taken and not is_again then return {'busy', whole(tonumber(head.lease_us) - now)} end
local damage = not is_again and log_damage(head)
if damage then return {'log_corrupt', redis.call('HGETALL', head_key), damage} end
local is_known = ARGV[4] == head.created_us .. ':' .. head.version
local ids, tail_damage = '', nil
if not is_known then ids, tail_damage = read_tail(head) end
if not ids then return {'log_corrupt', redis.call('HGETALL', head_key), tail_damage} end
local record, changes, has_turns = false, {}, true
if ARGV[5] then
  has_turns = redis.call('EXISTS', turns_key) == 1
  record, changes = begin_record(head, unpack(ARGV, 5))
  if record[1] == 'conflict' or record[1] == 'other_model' then return answer(record[1]) end
end
if not is_again then
  changes.holder, changes.lease_nonce = ARGV[1], ARGV[2]
  changes.lease_us, changes.fence = whole(now + tonumber(ARGV[3])), whole(head.fence + 1)
end
write_head(head, changes, not has_turns)
return {'ok', redis.call('HGETALL', head_key), ids, is_known and {} or read_tail_marks(head), record}
