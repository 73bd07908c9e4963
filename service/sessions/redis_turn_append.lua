#!lua
-- ARGV: created_us, fence, holder, turn_id, index, chunk.
local head = read_head()
if not head then return {'not_found'} end
if not holds_lease(head, ARGV[1], ARGV[2], ARGV[3]) then return {'lease_lost'} end
local turn = find_running(read_turns(clock_us()))
local num_chunks, index = redis.call('LLEN', tail_key), tonumber(ARGV[5])
if not turn or turn.id ~= ARGV[4] or index > num_chunks then return {'gone'} end
if index == num_chunks then
  redis.call('RPUSH', tail_key, ARGV[6])
  if num_chunks == 0 then keep_alive(head) end -- the key is new
end
return {'ok', turn.cancel}
